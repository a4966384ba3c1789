"""Attention operators on quantized queries, keys and values."""

from piper_kernels.attention.coarse import (
    apply_coarse_attention_residual,
    coarse_attention,
    coarse_attention_residual,
    mean_pool_block_values,
    sparse_piper_coarse_residual,
)
from piper_kernels.attention.piper_attention import piper_attention
from piper_kernels.attention.sage_attention_2pp import sage_attention_2pp
from piper_kernels.attention.sparse_piper_attention import SparsePiperAttention

__all__ = [
    "SparsePiperAttention",
    "apply_coarse_attention_residual",
    "coarse_attention",
    "coarse_attention_residual",
    "mean_pool_block_values",
    "piper_attention",
    "sage_attention_2pp",
    "sparse_piper_coarse_residual",
]
