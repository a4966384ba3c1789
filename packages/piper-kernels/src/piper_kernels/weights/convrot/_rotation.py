"""Grouped rotation by a regular, symmetric Hadamard matrix.

The factor H4 has the constant row sum 2, so no row of a rotated matrix collects the mean
of its group, as row 0 of a Sylvester matrix does. H(4**k) is the Kronecker power of H4
divided by sqrt(4**k): symmetric and orthonormal, therefore its own inverse. Its entries
are powers of two, exact in every floating dtype.
"""

from functools import cache

import torch
from torch import Tensor

from piper_kernels._autocast import full_precision

SUPPORTED_GROUP_SIZES = (16, 64, 256)

_H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


def require_group_size(group_size: int) -> None:
    """Raise ``ValueError`` unless ``group_size`` is one that ConvRot rotates by."""
    if group_size not in SUPPORTED_GROUP_SIZES:
        raise ValueError(
            f"ConvRot group size must be one of {SUPPORTED_GROUP_SIZES}, got {group_size!r}"
        )


def require_divisible(features: int, group_size: int) -> None:
    """Raise ``ValueError`` unless whole groups cover ``features``."""
    if features % group_size:
        raise ValueError(
            f"ConvRot feature dimension {features} is not divisible by group size {group_size}"
        )


def build_hadamard(
    size: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the orthonormal rotation matrix ``[size, size]``.

    Concrete matrices are built once per size, device and dtype. While a graph is traced,
    under a dispatch mode and on the meta device a fresh matrix is built instead, so that
    no traced tensor outlives its trace.

    Args:
        size: One of ``SUPPORTED_GROUP_SIZES``.
        device: Device of the matrix; the default device when omitted.
        dtype: Floating dtype of the matrix.

    Raises:
        ValueError: ``size`` is not supported.
    """
    require_group_size(size)
    resolved = torch.get_default_device() if device is None else torch.device(device)
    if (
        torch.compiler.is_compiling()
        or resolved.type == "meta"
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return _kronecker_power(size, resolved, dtype)
    return _cached_hadamard(size, resolved, dtype)


@cache
def _cached_hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # A matrix made in inference mode could not be used outside of it later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return _kronecker_power(size, device, dtype)


def _kronecker_power(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    factor = torch.tensor(_H4, device=device, dtype=dtype)
    matrix = factor
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, factor)
    return matrix * size**-0.5


def rotate_groups(value: Tensor, group_size: int) -> Tensor:
    """Rotate consecutive groups of the last axis: each group row ``g`` becomes ``g @ H``.

    The arithmetic runs in the dtype of ``value``, under autocast too; convert to float32
    first where the result is quantized. Applying the rotation twice restores the input.

    Args:
        value: Floating tensor ``[..., features]``.
        group_size: One of ``SUPPORTED_GROUP_SIZES``; must divide ``features``.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: The group size is not supported or does not divide ``features``.
    """
    require_group_size(group_size)
    require_divisible(value.shape[-1], group_size)
    with full_precision(value.device):
        return _rotate(value, group_size)


def _rotate(value: Tensor, group_size: int) -> Tensor:
    if group_size == 256 and value.dtype in (torch.float32, torch.float64):
        # H256 = H16 (x) H16, so a group seen as a 16 x 16 matrix G becomes H16 G H16: an
        # eighth of the multiplications. Low-precision inputs keep the single rounding.
        factor = build_hadamard(16, value.device, value.dtype)
        columns = (value.reshape(-1, 16) @ factor).view(-1, 16, 16)
        return torch.matmul(factor, columns).view(value.shape)
    matrix = build_hadamard(group_size, value.device, value.dtype)
    return (value.reshape(-1, group_size) @ matrix).view(value.shape)
