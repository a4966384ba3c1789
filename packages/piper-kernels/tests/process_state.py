"""States of a whole process that a caller may have set."""

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
