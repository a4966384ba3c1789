"""Weights quantized in the basis of a regular Hadamard rotation (ConvRot)."""

from piper_kernels.weights.convrot._rotation import SUPPORTED_GROUP_SIZES

__all__ = ["SUPPORTED_GROUP_SIZES"]
