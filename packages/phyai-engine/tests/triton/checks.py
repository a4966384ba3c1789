"""Runs a script of checks in Triton's interpreter or on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

WHERE = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


def run_checks(script, where):
    """Fails with what the script wrote unless it succeeds; skips where there is no GPU."""
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    environment = dict(os.environ)
    if where == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(script), *([where] if where == "cuda" else [])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
