"""Quantized tensor formats and inference operators for PyTorch.

Importing this package loads neither torchao nor triton; the subpackages that need
them import them.
"""

from piper_kernels.attention import (
    SparsePiperAttention,
    apply_coarse_attention_residual,
    coarse_attention,
    coarse_attention_residual,
    mean_pool_block_values,
    piper_attention,
    sage_attention_2pp,
    sparse_piper_coarse_residual,
)

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
