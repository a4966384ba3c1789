"""The public ConvRot INT8 linear function."""

from torch import Tensor

from piper_kernels.linear._dispatch import autocast_operands
from piper_kernels.linear.convrot.int8 import dispatch
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


def convrot_int8_linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight: ConvRotInt8Tensor,
    bias: Tensor | None = None,
    *,
    activation_fn: str | None = None,
) -> Tensor:
    """Multiply an input by a ConvRot INT8 weight, as ``torch.nn.functional.linear`` does.

    The input is activated, rotated and quantized by rows in FP32, multiplied with exact
    integer accumulation, scaled and biased in FP32 and rounded once. Inside an autocast
    region input, bias and logical weight dtype become the autocast dtype.

    Args:
        input: ``[..., in_features]``, or ``[..., 2 * in_features]`` as ``[up | gate]`` for
            ``"swiglu"``; in the logical dtype of the weight, any strides.
        weight: ``[out_features, in_features]``, not transposed.
        bias: ``[out_features]`` in float16, bfloat16 or float32.
        activation_fn: ``None``, ``"gelu_tanh"`` or ``"swiglu"`` (``up * silu(gate)``).

    Returns:
        ``[..., out_features]`` in the dtype of ``input``.

    Raises:
        TypeError: The weight is no ``ConvRotInt8Tensor`` or the bias no tensor.
        NotImplementedError: The weight is transposed or a conv3d weight.
        ValueError: A shape, dtype, device or layout does not fit.
        RuntimeError: Gradients are enabled and an operand requires them.
    """
    if not isinstance(weight, ConvRotInt8Tensor):
        raise TypeError(
            f"convrot_int8_linear needs a ConvRotInt8Tensor weight, got {type(weight).__name__}"
        )
    # A look at the codes costs less than one at the subclass.
    if weight.transposed or weight.qdata.ndim != 2:
        raise NotImplementedError(
            "ConvRot INT8 linear needs an untransposed 2-D weight, got shape "
            f"{tuple(weight.shape)} with transposed={weight.transposed}; "
            "for x @ weight.t() pass the weight itself"
        )
    input, bias, logical_dtype = autocast_operands(input, bias, weight.dtype)  # noqa: A001
    return dispatch.linear(
        input,
        weight.qdata,
        weight.scale,
        bias,
        weight.group_size,
        logical_dtype=logical_dtype,
        activation_fn=activation_fn,
        input_scale=weight.act_per_tensor_scale,
    )
