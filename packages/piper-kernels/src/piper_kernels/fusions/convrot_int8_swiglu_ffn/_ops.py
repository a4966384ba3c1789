"""Custom operators of SwiGLU networks of ConvRot INT8 linears."""

from piper_kernels.fusions._ffn.convrot_int8_ops import define_ffn_operators

swiglu_ffn, swiglu_ffn_gated_updates_ = define_ffn_operators(
    "convrot_int8_swiglu_ffn", ("gate", "value", "down"), "swiglu"
)
