"""Custom operators of SwiGLU networks of ConvRot NVFP4 linears.

A group size of 0 stands for a weight that is not rotated.
"""

from piper_kernels.fusions._ffn.nvfp4_ops import define_ffn_operators

swiglu_ffn, swiglu_ffn_gated_updates_ = define_ffn_operators(
    "convrot_nvfp4_swiglu_ffn", ("gate", "value", "down"), "swiglu", rotated=True
)
