"""Conversion of dense weights, by operator on accelerators and as plain code on the CPU."""

from torch import Tensor

from piper_kernels.weights.convrot.int8 import _backend, _ops


def quantize_weight(source: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rotate and quantize rows; the arithmetic is FP32.

    Args:
        source: float16, bfloat16 or float32 ``[rows, features]``, any strides.
        group_size: Rotation group, divides ``features``.

    Returns:
        int8 codes ``[rows, features]`` and FP32 scales ``[rows, 1]``.
    """
    operator = _backend.runs_in_operators(source.device)
    return (_ops if operator else _backend).quantize_weight(source, group_size)
