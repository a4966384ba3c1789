"""Tensors whose place in memory is known: launches are keyed by the alignment of pointers."""

import torch


def aligned(*shape, dtype=torch.float32, offset=0):
    """Return zeros that begin ``offset`` bytes, fewer than 16, behind a multiple of 16."""
    size = torch.Size(shape).numel() * dtype.itemsize
    storage = torch.zeros(size + 32, dtype=torch.uint8)
    start = -storage.data_ptr() % 16 + offset
    return storage[start : start + size].view(dtype).view(shape)
