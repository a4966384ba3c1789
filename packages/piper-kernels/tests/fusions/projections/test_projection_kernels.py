"""Projections to quantized operands in Triton's interpreter and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

CHECKS = Path(__file__).with_name("projection_checks.py")


def run_checks(*arguments, **environment):
    result = subprocess.run(
        [sys.executable, str(CHECKS), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "projection checks passed" in result.stdout


def test_numerics_in_the_interpreter():
    run_checks(TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu():
    run_checks("cuda")
