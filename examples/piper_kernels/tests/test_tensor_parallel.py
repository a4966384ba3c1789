import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parents[1] / "tensor_parallel.py"


@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="gloo is missing"
)
def test_two_processes_equal_one():
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--processes", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "2 processes, each with hidden (5, 96)" in result.stdout
    error = float(re.search(r"to one process: ([0-9.]+)", result.stdout)[1])
    assert 0 < error < 0.02
