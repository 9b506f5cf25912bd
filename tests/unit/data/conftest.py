"""The encoder that the stores of these tests are made for."""

from pathlib import Path

import pytest

from tests.support.tiny import make_encoder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))
