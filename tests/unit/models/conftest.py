"""Sizes of attention for packs of few tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from rtrain.models import attention, pack_layout


@pytest.fixture
def set_sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set constants of `pack_layout` and `attention` by name. `GROUP_WASTE` of 500 gives several groups."""

    def set_constants(**sizes: Any) -> None:
        for name, value in sizes.items():
            monkeypatch.setattr(pack_layout if hasattr(pack_layout, name) else attention, name, value)

    return set_constants
