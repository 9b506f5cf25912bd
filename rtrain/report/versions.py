"""Versions that a run ran on. They are logged when it is created: a report may be made elsewhere and later."""

import importlib.metadata
import platform

PACKAGES = ("rtrain", "ray", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


def installed() -> dict[str, str]:
    """Version by name, of Python, of the packages that training depends on, and of the platform."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # rtrain from a checkout that was not installed
            continue
    return found | {"platform": platform.platform()}
