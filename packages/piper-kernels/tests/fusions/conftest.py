"""Helpers of the tests of fusions with attention."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def projected_attention(load_module):
    """Return the module ``projected_attention.py``: plain models and their graphs."""
    return load_module(HERE / "projected_attention.py")


@pytest.fixture(scope="session")
def attention_operators(load_module):
    """Return the module ``attention_operators.py``: operands of explicit operators."""
    return load_module(HERE / "attention_operators.py")


@pytest.fixture(scope="session")
def projected_exact(load_module):
    """Return the module ``projected_exact.py``: what those models stand for."""
    return load_module(HERE / "projected_exact.py")
