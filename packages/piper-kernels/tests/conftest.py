"""Helpers that tests of several folders share."""

import importlib.util
from pathlib import Path

import pytest


def _load(folder, name):
    path = Path(__file__).parent / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def packed_data():
    """Return the module ``gguf/packed_data.py``: packed blocks and a scalar decoder."""
    return _load("gguf", "packed_data")


@pytest.fixture(scope="session")
def graph_capture():
    """Return the module ``_compile/graph_capture.py``: compilation up to the graph passes."""
    return _load("_compile", "graph_capture")
