"""rtrain: from a file of text to an HTTP answer, trained and served on Ray.

The verbs of the command line are functions here: `rtrain.train("intent", data=frame, label="category")`. They are
imported when they are first used: `import rtrain` loads neither Ray nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtrain.api.artifacts import (
        compare as compare,
        evaluate as evaluate,
        gate as gate,
        quantize as quantize,
        serve as serve,
    )
    from rtrain.api.keywords import loguniform as loguniform, uniform as uniform
    from rtrain.api.model import load as load
    from rtrain.api.training import distill as distill, train as train, tune as tune
    from rtrain.core.plugins import (
        register_augmentation as register_augmentation,
        register_loss as register_loss,
        register_metric as register_metric,
        register_source as register_source,
        register_task as register_task,
        register_tracker as register_tracker,
    )

__version__ = "0.1.0"

_API = {
    **dict.fromkeys(("train", "tune", "distill"), "rtrain.api.training"),
    **dict.fromkeys(("quantize", "evaluate", "gate", "compare", "serve"), "rtrain.api.artifacts"),
    **dict.fromkeys(("loguniform", "uniform"), "rtrain.api.keywords"),
    "load": "rtrain.api.model",
    **dict.fromkeys(
        (
            *("register_task", "register_loss", "register_metric"),
            *("register_source", "register_tracker", "register_augmentation"),
        ),
        "rtrain.core.plugins",
    ),
}
"""Module by the name of a function."""


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
