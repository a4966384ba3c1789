"""SageAttention2++: INT8 logits and FP8 probabilities times FP8 values."""

from piper_kernels.attention.sage_attention_2pp.op import sage_attention_2pp

__all__ = ["sage_attention_2pp"]
