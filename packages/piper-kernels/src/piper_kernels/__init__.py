"""Quantized tensor formats and inference operators for PyTorch.

Importing this package loads neither torchao nor triton; the subpackages that need
them import them.
"""

from piper_kernels.attention import piper_attention, sage_attention_2pp

__all__ = ["piper_attention", "sage_attention_2pp"]
