"""Float artifacts with rows, made once for all tests of quantization."""

import pytest

from tests.support import quantizing
from tests.support.quantizing import Made


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantizing.make(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def small_job(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantizing.make(tmp_path_factory.mktemp("small-job"), rows=80)
