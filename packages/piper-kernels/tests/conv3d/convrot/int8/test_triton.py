"""Numerics of the kernels: in Triton's interpreter, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CHECKS = Path(__file__).with_name("triton_checks.py")


def run_checks(*arguments, **environment):
    result = subprocess.run(
        [sys.executable, str(CHECKS), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "kernel checks passed" in result.stdout


def test_numerics_in_the_interpreter():
    run_checks(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
