"""transformers' classes of networks, by name, without what they import in vain."""

import sys
from typing import Any


def auto_class(name: str) -> Any:
    """One of transformers' auto classes, such as `AutoModelForSequenceClassification`.

    With any of them come the losses of object detection, and with these scipy's optimizers, if scipy is there: of the
    start of every worker 0.25 s of a core, and 30 MB. They are told that it is not.
    """
    import transformers

    if "transformers.loss.loss_utils" not in sys.modules:
        named: Any = transformers.utils
        known, named.is_scipy_available = named.is_scipy_available, lambda: False
        try:
            import transformers.loss.loss_utils
        finally:
            named.is_scipy_available = known
    return getattr(transformers, name)
