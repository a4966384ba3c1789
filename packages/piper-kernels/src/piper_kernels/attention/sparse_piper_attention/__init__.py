"""Attention to routed key blocks, with quantized queries, keys, values and probabilities."""

from piper_kernels.attention.sparse_piper_attention.op import SparsePiperAttention

__all__ = ["SparsePiperAttention"]
