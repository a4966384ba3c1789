"""Makes the shared helpers of the fuzz tests importable; without Hypothesis there are no tests."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if importlib.util.find_spec("hypothesis") else ["test_*.py"]
