"""States of a whole process: those that a caller may have set, and waiting for the GPU."""

from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype):
    """Make ``dtype`` the one of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def no_synchronization():
    """Make whatever waits for the GPU fail, once all that was launched before is done."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
