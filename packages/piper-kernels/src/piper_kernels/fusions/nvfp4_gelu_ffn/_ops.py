"""Custom operators of GELU networks of NVFP4 linears."""

from piper_kernels.fusions._ffn.nvfp4_ops import define_ffn_operators

gelu_ffn, gelu_ffn_gated_updates_ = define_ffn_operators(
    "nvfp4_gelu_ffn", ("up", "down"), "gelu_tanh", rotated=False
)
