"""Makes the shared helpers of the fuzz tests importable; without Hypothesis there are no tests."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
collect_ignore_glob = [] if importlib.util.find_spec("hypothesis") else ["test_*.py"]


@pytest.fixture(scope="session")
def projected_attention(load_module):
    """Return the module ``fusions/projected_attention.py``: plain models and their graphs."""
    return load_module(HERE.parent / "fusions" / "projected_attention.py")
