"""Errors of the user's, by the codes of their causes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rtrain.core.errors import ConfigError, UserError


@contextmanager
def refused_with(code: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """The block raises a `UserError` of that code, or a `ConfigError` with a problem of that code."""
    with pytest.raises(UserError) as error:
        yield error
    value = error.value
    codes = [problem.code for problem in value.problems] if isinstance(value, ConfigError) else [value.code]
    assert code in codes, f"{value} ({codes})"
