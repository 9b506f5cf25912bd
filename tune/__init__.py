"""The search over learning rate, aggregation frequency and other settings; `RecipeTrainable`, `OptunaAskSearch` and
`FreezeThaw` for a user's own `ray.tune.Tuner`. These import Ray, so they are imported at their first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune.ask_search import OptunaAskSearch as OptunaAskSearch
    from tune.freeze_thaw import FreezeThaw as FreezeThaw
    from tune.recipe_trainable import RecipeTrainable as RecipeTrainable

_MODULES = {"FreezeThaw": "freeze_thaw", "OptunaAskSearch": "ask_search", "RecipeTrainable": "recipe_trainable"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
