"""Launcher of dense 8-bit attention on Hopper. Importing needs a Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention._sm90_kernels.dense import dense_attention_kernel

TILE = 64
PAIR = 128
WARPS = 4
COPY_REGISTERS = 24


@dataclass(frozen=True)
class Plan:
    """How a program of dense attention is made.

    Attributes:
        groups: Warpgroups, each with 64 queries.
        ahead: Whether they start the scores of the next pair before a pair is finished.
        stages: Slots of the ring, each with a pair of key tiles.
        registers: Of a thread of a warpgroup.
    """

    groups: int
    ahead: bool
    stages: int
    registers: int


def choose_plan(head_dim: int, is_causal: bool, is_fp8: bool) -> Plan:
    """Return the plan of a call, as measured on an H200."""
    if is_fp8 or (head_dim == 64 and not is_causal):
        # Little is kept of a pair: three warpgroups have registers enough to take turns.
        ahead = is_fp8 and head_dim == 64 and not is_causal
        return Plan(groups=3, ahead=ahead, stages=8 if head_dim == 64 else 5, registers=160)
    return Plan(groups=2, ahead=True, stages=8 if head_dim == 64 else 4, registers=240)


@dataclass(frozen=True)
class ValueScales:
    """What the loop needs to know about INT8 values.

    Attributes:
        multiplier: FP32 ``[B, Hkv, Sk']``, 255 times the scale of a key; ``None`` where the 64
            keys of a tile share their scale.
        log_max: FP32 ``[B, Hkv, Sk' / 64]``, the logarithm to base 2 of the largest scale of 64
            keys.
        sums: int32 ``[B, Hkv, ceil(Sk' / 128), D]``: bits of the FP32 numbers ``127 s + b`` with
            ``s`` the sum of the codes of 128 keys and ``b`` in turn ``1.5 * 2**23`` and
            ``-1.5 * 2**23``.
    """

    multiplier: Tensor | None
    log_max: Tensor
    sums: Tensor


@dataclass(frozen=True)
class DenseOperands:
    """Prepared operands. Rows are padded to multiples of 64, tensors are contiguous.

    Attributes:
        query_codes: int8 ``[B, Hq, Sq', D]``.
        query_scale: FP32 ``[B, Hq, Sq' / 32]`` with the factor of the logits and ``log2(e)``.
        key_codes: int8 ``[B, Hkv, Sk', D]``.
        key_scale: FP32 ``[B, Hkv, Sk' / 64]``.
        value_codes: ``[B, Hkv, D, Sk']`` with permuted keys; int8, or float8_e4m3fn.
        value_vector: FP32 ``[B, Hkv, D]``: the mean of INT8 values, ``None`` for zero; or the
            scales of E4M3 values.
        scales: Present for INT8 values.
    """

    query_codes: Tensor
    query_scale: Tensor
    key_codes: Tensor
    key_scale: Tensor
    value_codes: Tensor
    value_vector: Tensor | None
    scales: ValueScales | None


@cache
def _layout(element: gl.dtype, *block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """Return the TMA descriptor of tiles of a contiguous tensor with as many dimensions."""
    layout = _layout(gl.int8 if tensor.element_size() == 1 else gl.int32, *block)
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


def _operands(o: DenseOperands) -> tuple[TensorDescriptor | Tensor, ...]:
    """Return descriptors and pointers of the kernel in its order."""
    head_dim, stored_keys, scales = o.query_codes.shape[3], o.key_codes.shape[2], o.scales
    # Stand-ins of what there is not are not read; those of descriptors must be aligned, which
    # the scales of a single sequence need not be.
    multiplier = None if scales is None else scales.multiplier
    multiplier = o.key_codes.view(torch.float32) if multiplier is None else multiplier
    sums = o.key_codes.view(torch.int32) if scales is None else scales.sums
    return (
        descriptor(o.query_codes.view(-1, head_dim), TILE, head_dim),
        descriptor(o.key_codes.view(-1, head_dim), PAIR, head_dim),
        descriptor(o.value_codes.view(-1, stored_keys), head_dim, TILE),
        descriptor(multiplier.view(-1), PAIR),
        descriptor(sums.view(-1), head_dim),
        o.query_scale,
        o.key_scale,
        o.key_scale if scales is None else scales.log_max,
        o.key_scale if o.value_vector is None else o.value_vector,
    )


def attend(
    operands: DenseOperands,
    queries: int,
    keys: int,
    is_causal: bool,
    dtype: torch.dtype,
    *,
    origin: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return dense attention ``[B, Hq, queries, D]``.

    Args:
        operands: Prepared queries, keys and values.
        queries: Queries without padding.
        keys: Keys without padding.
        is_causal: Whether later keys are hidden.
        dtype: Of the result.
        origin: Position of the first query among the keys, a multiple of 128; for the mask.
        out: Room for the result with contiguous features; heads of batches are equally far
            apart. ``None``: it is allocated, contiguous.
    """
    o = operands
    batch, heads, stored_queries, head_dim = o.query_codes.shape
    kv_heads, stored_keys = o.key_codes.shape[1:3]
    window = out is not None
    if out is None:
        out = o.query_scale.new_empty((batch, heads, queries, head_dim), dtype=dtype)
    if out.numel() == 0:
        return out
    plan = choose_plan(head_dim, is_causal, o.scales is None)
    tiles = -(-queries // (plan.groups * TILE))
    scales = o.scales
    with launch_guard(out.device):
        dense_attention_kernel[(batch * heads * tiles,)](
            *_operands(o),
            out,
            tiles,
            queries,
            keys,
            stored_queries,
            stored_keys,
            heads // kv_heads,
            origin,
            *out.stride()[1:3],
            CAUSAL=is_causal,
            FP8=scales is None,
            PER_KEY=scales is not None and scales.multiplier is not None,
            HAS_MEAN=scales is not None and o.value_vector is not None,
            GROUPS=plan.groups,
            AHEAD=plan.ahead,
            STAGES=plan.stages,
            COPY_REGISTERS=COPY_REGISTERS,
            ATTEND_REGISTERS=plan.registers,
            WINDOW=window,
            num_warps=WARPS,
        )
    return out
