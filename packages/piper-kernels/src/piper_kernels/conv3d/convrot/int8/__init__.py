"""Causal 3x3x3 convolutions with ConvRot INT8 weights."""

from piper_kernels.conv3d.convrot.int8.module import ConvRotInt8Conv3d
from piper_kernels.conv3d.convrot.int8.op import conv3d, group_norm_silu_conv3d

__all__ = ["ConvRotInt8Conv3d", "conv3d", "group_norm_silu_conv3d"]
