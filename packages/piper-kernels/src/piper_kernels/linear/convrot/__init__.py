"""Linear operators on ConvRot weights."""

from piper_kernels.linear.convrot.int8.op import convrot_int8_linear

__all__ = ["convrot_int8_linear"]
