"""Launches of the attention loops in plain Triton. Importing needs Triton."""

# pyright: reportCallIssue=false

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper_kernels._triton.mixed_sign import mixed_sign_dots
from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention._mixed_sign.plan import AttentionPlan, Product
from piper_kernels.attention._mixed_sign_kernels.dense import dense_kernel
from piper_kernels.attention._mixed_sign_kernels.fp8 import fp8_kernel
from piper_kernels.attention._mixed_sign_kernels.sparse import sparse_kernel
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest

BLOCK = 64


def stage_hook(plan: AttentionPlan) -> AbstractContextManager[None]:
    """Return a context in which the kernels of a plan compile."""
    return nullcontext() if plan.product is Product.AFFINE else mixed_sign_dots()


def dense_constants(
    plan: AttentionPlan, head_dim: int, groups: int, is_causal: bool, *, window: bool = False
) -> dict:
    """Return the compile-time arguments of the dense loop; a window writes to given room."""
    return {
        "HEAD_DIM": head_dim,
        "GROUPS": groups,
        "BLOCK_M": plan.block_m,
        "QUERY_GROUP": 32 if plan.grouped_qk else 1,
        "KEY_GROUP": 64 if plan.grouped_qk else 1,
        "CAUSAL": is_causal,
        "SPLIT": plan.split_pv_head_dim,
        "BOUND": plan.derive_value_log_bound,
        "PACKED": plan.use_packed_probability_conversion,
        "PRODUCT": plan.product.value,
        "WINDOW": window,
    }


def attend(
    query_codes: Tensor,
    query_scale: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    value_codes: Tensor,
    value_multiplier: Tensor,
    value_mean: Tensor | None,
    *,
    query_length: int,
    key_length: int,
    is_causal: bool,
    dtype: torch.dtype,
    plan: AttentionPlan,
    origin: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return dense Piper attention, ``[B, Hq, query_length, D]``.

    Storage is that of ``piper_attention.prepared`` with the granularity of the plan and rows
    padded to 64; ``value_mean`` is ``None`` when causal. ``origin`` is the position of the first
    query among the keys, a multiple of 64. The features of ``out`` are contiguous and the heads
    of its batches equally far apart; by default it is allocated.
    """
    batch, heads, stored_queries, head_dim = query_codes.shape
    kv_heads, stored_keys = key_codes.shape[1:3]
    window = out is not None
    if out is None:
        out = torch.empty(
            (batch, heads, query_length, head_dim), dtype=dtype, device=query_codes.device
        )
    grid = (triton.cdiv(query_length, plan.block_m) * batch * heads,)
    mean = value_multiplier if value_mean is None else value_mean
    with launch_guard(out.device), stage_hook(plan):
        if grid[0]:
            dense_kernel[grid](
                query_codes, query_scale, key_codes, key_scale, value_codes, value_multiplier,
                mean, out, query_length, key_length, stored_queries // BLOCK,
                stored_keys // BLOCK, heads, origin, *out.stride()[1:3],
                **dense_constants(plan, head_dim, heads // kv_heads, is_causal, window=window),
                num_warps=plan.num_warps, num_stages=plan.num_stages,
            )  # fmt: skip
    return out


def attend_fp8(
    query_codes: Tensor,
    query_scale: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    *,
    query_length: int,
    key_length: int,
    is_causal: bool,
    dtype: torch.dtype,
    plan: AttentionPlan,
) -> Tensor:
    """Return SageAttention2++, ``[B, H, query_length, D]``; rows are padded to 64."""
    batch, heads, stored_queries, head_dim = query_codes.shape
    out = torch.empty(
        (batch, heads, query_length, head_dim), dtype=dtype, device=query_codes.device
    )
    grid = (triton.cdiv(query_length, plan.block_m) * batch * heads,)
    with launch_guard(out.device):
        if grid[0]:
            fp8_kernel[grid](
                query_codes, query_scale, key_codes, key_scale, value_codes, value_scale, out,
                query_length, key_length, stored_queries // BLOCK, key_codes.shape[2] // BLOCK,
                **fp8_constants(plan, head_dim, is_causal),
                num_warps=plan.num_warps, num_stages=plan.num_stages,
            )  # fmt: skip
    return out


def fp8_constants(plan: AttentionPlan, head_dim: int, is_causal: bool) -> dict:
    """Return the compile-time arguments of the E4M3 loop."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_M": plan.block_m,
        "QUERY_GROUP": 32 if plan.grouped_qk else 1,
        "KEY_GROUP": 64 if plan.grouped_qk else 1,
        "CAUSAL": is_causal,
        "SUM_DTYPE": tl.float32 if plan.product is Product.AFFINE else tl.float16,
    }


def sparse_constants(plan: AttentionPlan, head_dim: int, groups: int) -> dict:
    """Return the compile-time arguments of the sparse loop, except what a call reads."""
    return {
        "HEAD_DIM": head_dim,
        "GROUPS": groups,
        "PACKED": plan.use_packed_probability_conversion,
        "PRODUCT": plan.product.value,
    }


def attend_sparse(
    operands: PreparedOperands,
    request: RoutingRequest,
    routes: Tensor | None,
    table: Tensor | None,
    *,
    rows: int,
    block_lengths: Tensor | None,
    dtype: torch.dtype,
    plan: AttentionPlan,
    coarse_output: Tensor | None = None,
    coarse_gate: Tensor | None = None,
    query_block_offset: int = 0,
    query_block_count: int | None = None,
    query_rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return sparse Piper attention of a range of query blocks, ``[B, rows of it, Hq, D]``.

    Args:
        operands: Codes and scales; the queries may be others than the keys.
        request: Budgets and routing of the call.
        routes: uint16 ``[B, routed blocks, R]``; ``None``: every query sees every key.
        table: int32, kept blocks and offsets of the heads; given with ``routes``.
        rows: Rows that exist, or all of them with ``block_lengths``.
        block_lengths: int32 ``[blocks]``, or ``None``.
        dtype: Dtype of the result.
        plan: How the loop is executed.
        coarse_output: FP32 ``[B, Hq, blocks, D]``, added times the gate; or ``None``.
        coarse_gate: Floating ``[B, rows, Hq, D]``, given with ``coarse_output``.
        query_block_offset: First query block of the range.
        query_block_count: Query blocks of the range; ``None``: all that follow.
        query_rows: Queries; ``None``: as many as ``rows``.
        out: Contiguous room for the result; ``None``: it is allocated.
    """
    o = operands
    batch, heads, stored, head_dim = o.query.shape
    blocks = stored // BLOCK
    query_rows = rows if query_rows is None else query_rows
    count = blocks - query_block_offset if query_block_count is None else query_block_count
    out_rows = min(count * BLOCK, query_rows - query_block_offset * BLOCK)
    if out is None:
        out = torch.empty((batch, out_rows, heads, head_dim), dtype=dtype, device=o.query.device)
    gate = None if coarse_gate is None else _features_side_by_side(coarse_gate)
    with launch_guard(out.device), stage_hook(plan):
        if batch * heads * count:
            sparse_kernel[(batch * heads * count,)](
                o.query, o.query_scale, o.key, o.key_scale, o.value, o.value_multiplier,
                o.value_mean, _or(block_lengths, o.query_scale), _or(routes, o.query_scale),
                _or(table, o.query_scale), _or(coarse_output, o.query_scale),
                _or(gate, o.query_scale), out, rows, o.key.shape[2] // BLOCK, query_block_offset,
                count, request.routed_blocks(blocks), request.sparse_key_blocks,
                request.layout.routes_per_query, heads, blocks, query_rows,
                *((0, 0, 0) if gate is None else gate.stride()[:3]),
                **sparse_constants(plan, head_dim, heads // o.key.shape[1]),
                ROUTED=routes is not None, HAS_LENGTHS=block_lengths is not None,
                HAS_COARSE=coarse_output is not None,
                num_warps=plan.num_warps, num_stages=plan.num_stages,
            )  # fmt: skip
    return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _features_side_by_side(gate: Tensor) -> Tensor:
    return gate if gate.stride(3) == 1 else gate.contiguous()
