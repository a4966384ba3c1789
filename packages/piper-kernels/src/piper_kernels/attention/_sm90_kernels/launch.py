"""Launcher of dense 8-bit attention on Hopper. Importing needs a Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention._sm90_kernels.dense import dense_attention_kernel

QUERY_TILE = 128
TILE = 64
STAGES = {64: 8, 128: 4}
COPY_REGISTERS = 24
ATTEND_REGISTERS = 240
_DTYPES = {
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.int8,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
}


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """Return the TMA descriptor of tiles of a contiguous tensor with as many dimensions."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


def attend(
    query_codes,
    query_scale,
    key_codes,
    key_scale,
    value_codes,
    multiplier,
    log_max,
    sums,
    vector,
    out,
    keys,
    is_causal,
    kernel=None,
    stages=None,
):
    batch, heads, stored_queries, head_dim = query_codes.shape
    kv_heads, stored_keys = key_codes.shape[1:3]
    queries = out.shape[2]
    fp8 = multiplier is None
    tiles = -(-queries // QUERY_TILE)
    m_desc = descriptor((key_scale if fp8 else multiplier).view(-1), 128)
    s_desc = descriptor((key_scale.view(torch.int32) if fp8 else sums).view(-1), head_dim)
    with launch_guard(out.device):
        return (kernel or dense_attention_kernel)[(batch * heads * tiles,)](
            descriptor(query_codes.view(-1, head_dim), TILE, head_dim),
            descriptor(key_codes.view(-1, head_dim), TILE, head_dim),
            descriptor(value_codes.view(-1, stored_keys), head_dim, TILE),
            m_desc,
            s_desc,
            query_scale,
            key_scale,
            key_scale if fp8 else log_max,
            key_scale if vector is None else vector,
            out,
            tiles,
            queries,
            keys,
            stored_queries,
            stored_keys,
            heads // kv_heads,
            CAUSAL=is_causal,
            FP8=fp8,
            HAS_MEAN=vector is not None and not fp8,
            STAGES=stages or STAGES[head_dim],
            COPY_REGISTERS=COPY_REGISTERS,
            ATTEND_REGISTERS=ATTEND_REGISTERS,
            num_warps=4,
        )
