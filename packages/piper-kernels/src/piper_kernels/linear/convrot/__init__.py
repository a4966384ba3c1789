"""Linear operators on ConvRot weights."""

from piper_kernels.linear.convrot._compile_options import convrot_int8_compile_options
from piper_kernels.linear.convrot.int8.op import convrot_int8_linear

__all__ = ["convrot_int8_compile_options", "convrot_int8_linear"]
