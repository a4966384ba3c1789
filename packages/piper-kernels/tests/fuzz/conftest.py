"""Makes the shared helpers of the fuzz tests importable; without Hypothesis there are no tests."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
collect_ignore_glob = [] if importlib.util.find_spec("hypothesis") else ["test_*.py"]


@pytest.fixture(scope="session")
def projected_attention():
    """Return the module ``fusions/projected_attention.py``: plain models and their graphs."""
    path = HERE.parent / "fusions" / "projected_attention.py"
    spec = importlib.util.spec_from_file_location("projected_attention", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
