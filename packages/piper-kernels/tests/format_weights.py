"""Weights of every format, made from dense ones."""

from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor


def quantized(fmt, dense, *, group_size=16, act=None):
    """Return ``dense`` as ``convrot_int8``, ``nvfp4`` or ``convrot_nvfp4``.

    Inputs are quantized with the scale ``act``, or dynamically without one.
    """
    if fmt == "convrot_int8":
        return ConvRotInt8Tensor.from_hp(dense, group_size=group_size, act_per_tensor_scale=act)
    options = {
        "is_swizzled_scales": True,
        "act_per_tensor_scale": act,
        "act_quant_kwargs": QuantizeTensorToNVFP4Kwargs(
            is_swizzled_scales=True, use_dynamic_per_tensor_scale=act is None
        ),
    }
    if fmt == "nvfp4":
        return PiperNVFP4Tensor.from_hp(dense, **options)
    return ConvRotNVFP4Tensor.from_hp(dense, group_size=group_size, **options)
