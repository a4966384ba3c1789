"""Attention over block means: a residual that sparse attention is composed with."""

from piper_kernels.attention.coarse.op import (
    apply_coarse_attention_residual,
    coarse_attention,
    coarse_attention_residual,
    mean_pool_block_values,
    sparse_piper_coarse_residual,
)

__all__ = [
    "apply_coarse_attention_residual",
    "coarse_attention",
    "coarse_attention_residual",
    "mean_pool_block_values",
    "sparse_piper_coarse_residual",
]
