"""Numerics of the kernels: in Triton's interpreter, and on a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CHECKS = Path(__file__).with_name("triton_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_kernel_checks(CHECKS)
