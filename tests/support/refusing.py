"""How tests look at errors that a user reads: by their code, not by their words."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rtrain.core.errors import ConfigError, UserError


@contextmanager
def refused(code: str, *fields: str) -> Iterator[None]:
    """The block raises an error of that code; or a `ConfigError` about these fields, each with that code."""
    with pytest.raises(UserError) as caught:
        yield
    if fields:
        assert isinstance(caught.value, ConfigError)
        assert [(each.field, each.code) for each in caught.value.problems] == [(field, code) for field in fields]
    else:
        assert caught.value.code == code, caught.value


@contextmanager
def refused_fields(*fields: str) -> Iterator[None]:
    """The block raises a `ConfigError` about these fields."""
    with pytest.raises(ConfigError) as caught:
        yield
    assert [each.field for each in caught.value.problems] == list(fields)
