"""What a run ran on; logged when it is created, since a report may be made elsewhere and later."""

import importlib.metadata
import platform

PACKAGES = ("rtrain", "ray", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


def installed() -> dict[str, str]:
    """Version by name: Python, the packages that training depends on, the platform."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # rtrain from a checkout that was not installed
            continue
    return found | {"platform": platform.platform()}
