"""Makes the modules of this folder importable, and memory that nobody wrote visible."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def nan_filled_memory():
    """Fill tensors from ``torch.empty`` with NaN, so that an unwritten row is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.use_deterministic_algorithms(before)
