"""Helpers of the tests of fusions with attention."""

import importlib.util
import sys
from pathlib import Path

import pytest


def _load(name):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def projected_attention():
    """Return the module ``projected_attention.py``: plain models and their graphs."""
    return _load("projected_attention")


@pytest.fixture(scope="session")
def attention_operators():
    """Return the module ``attention_operators.py``: operands of explicit operators."""
    return _load("attention_operators")


@pytest.fixture(scope="session")
def projected_exact():
    """Return the module ``projected_exact.py``: what those models stand for."""
    return _load("projected_exact")
