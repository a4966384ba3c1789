"""Helpers that tests of several folders share."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# aligned_memory, format_weights, machine_code and process_state
sys.path.insert(0, str(HERE))


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_module():
    """Return a function that runs a Python file and returns it as a module."""
    return _load


@pytest.fixture(scope="session")
def packed_data():
    """Return the module ``gguf/packed_data.py``: packed blocks and a scalar decoder."""
    return _load(HERE / "gguf" / "packed_data.py")


@pytest.fixture(scope="session")
def graph_capture():
    """Return the module ``_compile/graph_capture.py``: compilation up to the graph passes."""
    return _load(HERE / "_compile" / "graph_capture.py")


@pytest.fixture
def own_compiler_cache(tmp_path, monkeypatch):
    """Make kernels compile, instead of being found where another test has left them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
