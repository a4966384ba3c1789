"""Models of attention between projections."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def projected_attention():
    """Return the module ``projected_attention.py``: plain models and their graphs."""
    path = Path(__file__).with_name("projected_attention.py")
    spec = importlib.util.spec_from_file_location("projected_attention", path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    import sys

    sys.modules["projected_attention"] = module
    spec.loader.exec_module(module)
    return module
