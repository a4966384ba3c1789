"""Custom operators of GELU networks of ConvRot NVFP4 linears.

A group size of 0 stands for a weight that is not rotated.
"""

from piper_kernels.fusions._ffn.nvfp4_ops import define_ffn_operators

gelu_ffn, gelu_ffn_gated_updates_ = define_ffn_operators(
    "convrot_nvfp4_gelu_ffn", ("up", "down"), "gelu_tanh", rotated=True
)
