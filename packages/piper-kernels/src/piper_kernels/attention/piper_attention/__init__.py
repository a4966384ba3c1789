"""Dense Piper attention: INT8 logits and unsigned probabilities times INT8 values."""

from piper_kernels.attention.piper_attention.op import piper_attention

__all__ = ["piper_attention"]
