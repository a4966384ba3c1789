"""Helpers that tests of several folders share."""

import importlib.util
import sys
from pathlib import Path

import pytest

# format_weights, machine_code and process_state
sys.path.insert(0, str(Path(__file__).resolve().parent))


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


@pytest.fixture
def own_compiler_cache(tmp_path, monkeypatch):
    """Make kernels compile, instead of being found where another test has left them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
