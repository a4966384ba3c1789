"""Custom operators of GELU networks of ConvRot INT8 linears."""

from piper_kernels.fusions._ffn.convrot_int8_ops import define_ffn_operators

gelu_ffn, gelu_ffn_gated_updates_ = define_ffn_operators(
    "convrot_int8_gelu_ffn", ("up", "down"), "gelu_tanh"
)
