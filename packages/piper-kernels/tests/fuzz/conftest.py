"""Makes the shared helpers of the fuzz tests importable."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
sys.path.insert(0, str(Path(__file__).parent))
