"""Which targets execute the parts of a fusion with attention in kernels."""

import torch

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention.piper_attention._backend import BACKENDS as DENSE_BACKENDS
from piper_kernels.attention.sparse_piper_attention._backend import BACKENDS as SPARSE_BACKENDS
from piper_kernels.linear.convrot.int8._selection import supports_matmul
from piper_kernels.linear.nvfp4._backend import support_of_kernels


def supports_sparse_attention(device: torch.device, head_dim: int) -> tuple[bool, str]:
    """Return whether sparse Piper attention runs in kernels on a device, or why not."""
    reasons = []
    for backend in SPARSE_BACKENDS[:-1]:  # the last one is portable
        usable, reason = backend.support(device, head_dim)
        if usable:
            return True, ""
        reasons.append(reason)
    return False, "; ".join(reasons)


def supports_dense_attention(
    device: torch.device, head_dim: int, is_causal: bool
) -> tuple[bool, str]:
    """Return whether dense Piper attention runs in kernels on a device, or why not."""
    request = AttentionRequest(accelerator_target(device), head_dim, is_causal)
    reasons = []
    for backend in DENSE_BACKENDS[:-1]:
        usable, reason = backend.support(request)
        if usable:
            return True, ""
        reasons.append(reason)
    return False, "; ".join(reasons)


def supports_int8_projections(device: torch.device) -> tuple[bool, str]:
    """Return whether ConvRot INT8 linears run in kernels on a device, or why not."""
    target = accelerator_target(device)
    if target is None:
        return False, f"projections need a CUDA or ROCm device, got {device}"
    return supports_matmul(target)


def supports_nvfp4_projections(device: torch.device) -> tuple[bool, str]:
    """Return whether NVFP4 linears run in kernels on a device, or why not."""
    return support_of_kernels(device)
