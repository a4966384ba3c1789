"""Attention operators on quantized queries, keys and values."""

from piper_kernels.attention.piper_attention import piper_attention
from piper_kernels.attention.sage_attention_2pp import sage_attention_2pp

__all__ = ["piper_attention", "sage_attention_2pp"]
