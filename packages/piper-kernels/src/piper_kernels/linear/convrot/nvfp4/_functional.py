"""The public ConvRot NVFP4 linear function."""

from torch import Tensor

from piper_kernels.linear.nvfp4._functional import nvfp4_linear
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor


def convrot_nvfp4_linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight: ConvRotNVFP4Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply an input by a ConvRot NVFP4 weight, as ``torch.nn.functional.linear`` does.

    With ``weight.act_quant_kwargs`` the input is rotated and quantized to NVFP4 in FP32;
    without them the weight is dequantized and multiplied in the logical dtype.

    Args:
        input: ``[..., in_features]`` in the logical dtype of the weight, any strides.
        weight: ``[out_features, in_features]``, not transposed.
        bias: ``[out_features]`` in float16, bfloat16 or float32.

    Returns:
        ``[..., out_features]`` in the dtype of ``input``.

    Raises:
        TypeError: The weight is no ``ConvRotNVFP4Tensor`` or the bias no tensor.
        NotImplementedError: The weight is transposed.
        ValueError: A shape, dtype, device or layout does not fit.
        RuntimeError: The input is to be quantized while gradients are enabled and an operand
            requires them.
    """
    if not isinstance(weight, ConvRotNVFP4Tensor):
        raise TypeError(
            f"convrot_nvfp4_linear needs a ConvRotNVFP4Tensor weight, got {type(weight).__name__}"
        )
    return nvfp4_linear(input, weight, bias)
