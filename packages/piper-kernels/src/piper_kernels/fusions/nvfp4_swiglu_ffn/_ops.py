"""Custom operators of SwiGLU networks of NVFP4 linears."""

from piper_kernels.fusions._ffn.nvfp4_ops import define_ffn_operators

swiglu_ffn, swiglu_ffn_gated_updates_ = define_ffn_operators(
    "nvfp4_swiglu_ffn", ("gate", "value", "down"), "swiglu", rotated=False
)
