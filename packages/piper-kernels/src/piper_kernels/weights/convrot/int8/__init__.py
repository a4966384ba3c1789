"""ConvRot INT8: rotated weights stored as int8 codes with one FP32 scale per output row."""

from piper_kernels.weights.convrot.int8.tensor import ConvRotInt8Tensor

__all__ = ["ConvRotInt8Tensor"]
