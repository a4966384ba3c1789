"""Checks of operands and counts: host metadata only, valid under tracing and graph capture."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROUTED_BLOCKS = 65_536  # routes are uint16


def check_operands(label: str, operands: Mapping[str, Tensor]) -> None:
    """Check rank, dtype, layout, device, head width and length of ``[B, S, H, D]`` operands.

    Raises:
        ValueError: An operand does not fit, or the operands differ in more than their heads.
    """
    first = next(iter(operands.values()))
    for name, operand in operands.items():
        if operand.ndim != 4:
            raise ValueError(
                f"{label}: {name} must be [batch,sequence,heads,features], "
                f"got shape {tuple(operand.shape)}"
            )
        if operand.dtype not in DTYPES or operand.dtype != first.dtype:
            names = ", ".join(operands)
            raise ValueError(
                f"{label}: {names} must share float16, bfloat16, or float32, "
                f"{name} is {operand.dtype}"
            )
        if operand.device != first.device:
            raise ValueError(
                f"{label}: operands must share a device, "
                f"{name} is on {operand.device}, the first on {first.device}"
            )
        if operand.layout is not torch.strided or operand.stride(3) != 1:
            raise ValueError(f"{label}: {name} must be strided with contiguous features")
        if operand.shape[:2] != first.shape[:2] or operand.shape[3] != first.shape[3]:
            raise ValueError(
                f"{label}: operands must have matching shapes, "
                f"{name} is {tuple(operand.shape)}, the first {tuple(first.shape)}"
            )
    if first.shape[3] not in (64, 128):
        raise ValueError(f"{label} requires head_dim=64 or 128, got {first.shape[3]}")
    if first.shape[1] < BLOCK:
        raise ValueError(f"{label} requires at least 64 sequence rows, got {first.shape[1]}")


def check_heads(label: str, heads: int, key_heads: int, value_heads: int) -> None:
    """Check that query heads are a multiple of equally many key and value heads.

    Raises:
        ValueError: They are not.
    """
    if key_heads != value_heads or key_heads < 1 or heads < 1 or heads % key_heads:
        raise ValueError(
            f"{label}: the query head count must be a multiple of equal key and value head "
            f"counts, got {heads}, {key_heads} and {value_heads}"
        )


def check_block_lengths(
    label: str, lengths: Tensor | None, rows: int, device: torch.device
) -> None:
    """Check the metadata of block lengths; their values are the caller's precondition.

    Raises:
        TypeError: They are no tensor.
        ValueError: They are not contiguous int32 ``[rows / 64]`` on the device.
    """
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{label}: block_lengths must be a tensor, got {type(lengths).__name__}")
    if (
        lengths.ndim != 1
        or lengths.dtype != torch.int32
        or lengths.device != device
        or lengths.shape[0] * BLOCK != rows
        or not lengths.is_contiguous()
    ):
        raise ValueError(
            f"{label}: block_lengths must be contiguous int32 on {device} with one entry for each "
            f"64 of {rows} rows, got {lengths.dtype} of shape {tuple(lengths.shape)} on "
            f"{lengths.device}"
        )


def check_scale(what: str, scale: float) -> float:
    """Return the scale as a number.

    Raises:
        ValueError: It is not finite and positive.
    """
    scale = float(scale)
    if not 0 < scale < math.inf:  # false for NaN; traced graphs cannot ask isfinite
        raise ValueError(f"{what} must be finite and positive, got {scale}")
    return scale


def check_inference(label: str, *operands: Tensor) -> None:
    """Refuse operands that would need a gradient.

    Raises:
        RuntimeError: Gradients are enabled and one requires them.
    """
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise RuntimeError(f"{label} is inference-only; call it under torch.no_grad()")


def check_count(label: str, name: str, count: int, low: int, high: int) -> None:
    """Check a number of blocks. Symbolic numbers become assumptions of the graph.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is outside ``[low, high]``.
    """
    if isinstance(count, bool) or not isinstance(count, int | torch.SymInt):
        raise TypeError(f"{label}: {name} must be an integer, got {type(count).__name__}")
    if torch.compiler.is_compiling() or isinstance(count, torch.SymInt):
        # Tracing needs messages that refer to nothing.
        torch._check(count >= low, lambda: "too few blocks for sparse Piper attention")
        torch._check(count <= high, lambda: "more blocks than the sequence has")
    elif not low <= count <= high:
        raise ValueError(f"{label}: {name} must be in [{low}, {high}], got {count}")


def check_routing_counts(label: str, key_blocks: int, query_blocks: int | None, rows: int) -> None:
    """Check the routed block counts against a sequence of ``rows``.

    Raises:
        TypeError: A count is not an integer.
        ValueError: A count is out of range.
    """
    check_count(label, "sparse_key_blocks", key_blocks, 1, rows // BLOCK)
    check_count(label, "sparse_key_blocks", key_blocks, 1, MAX_ROUTED_BLOCKS)
    if query_blocks is not None:
        check_count(label, "sparse_query_blocks", query_blocks, 0, block_count(rows))
