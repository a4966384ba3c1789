"""Results do not depend on what the caller set for the whole process."""

from contextlib import contextmanager

import pytest
import torch
from operator_samples import samples
from process_state import default_dtype

SAMPLES = samples("cpu")


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default float64": lambda: default_dtype(torch.float64),
    "default device": lambda: default_device("meta"),
    "deterministic": deterministic,
    "inference mode": torch.inference_mode,
}


def run(sample):
    """Return what a call returns and what it writes, with operands of its own."""
    arguments = [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a)
        if isinstance(a, torch.Tensor)
        else a
        for a in sample.arguments
    ]
    returned = sample.overload(*arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [value for value in (*returned, *arguments) if isinstance(value, torch.Tensor)]


def same(left, right):
    if (left.dtype, left.device, left.shape) != (right.dtype, right.device, right.shape):
        return False
    if not left.numel() or not left.ndim:
        return torch.equal(left, right)
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (left, right)))


@pytest.mark.parametrize("state", STATES)
def test_no_operator_depends_on_it(state):
    different = []
    with torch.no_grad():
        for sample in SAMPLES:
            expected = run(sample)
            with STATES[state]():
                found = run(sample)
            if not all(map(same, expected, found)):
                different.append(str(sample))
    assert not different
