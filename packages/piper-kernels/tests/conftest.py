"""Helpers that tests of several folders share."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def packed_data():
    """Return the module ``gguf/packed_data.py``: packed blocks and a scalar decoder."""
    path = Path(__file__).parent / "gguf" / "packed_data.py"
    spec = importlib.util.spec_from_file_location("packed_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
