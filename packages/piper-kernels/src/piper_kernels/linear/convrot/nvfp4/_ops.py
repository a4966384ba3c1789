"""Custom operators of ConvRot NVFP4 linear; prepared inputs go to ``nvfp4_linear_prepared``.

Like those of ``linear.nvfp4`` they run on every device and check metadata, in fakes too.
"""

from torch import Tensor

from piper_kernels.linear._operators import fake_of, operator
from piper_kernels.linear.nvfp4._backend import select_linear_backend
from piper_kernels.linear.nvfp4._contract import prepared_shapes, validate_level
from piper_kernels.linear.nvfp4._ops import check_linear, fake_prepared
from piper_kernels.weights.convrot._rotation import require_group_size


@operator("convrot_nvfp4_linear")
def linear(
    input: Tensor,  # noqa: A002  # the name of F.linear
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    activation_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_activation_scale: bool,
    group_size: int,
    high_first: bool = False,
) -> Tensor:
    """Return the linear of an input that is rotated and quantized first, ``[..., N]``."""
    require_group_size(group_size)
    operands = (weight_qdata, weight_scale, weight_per_tensor_scale, activation_per_tensor_scale)
    check_linear(input, *operands, bias, group_size)
    backend = select_linear_backend(input.device)
    return backend.linear(
        input, *operands, bias, dynamic_activation_scale, high_first, group_size=group_size
    )


@fake_of("convrot_nvfp4_linear")
def _(
    input: Tensor,  # noqa: A002
    weight_qdata: Tensor,
    weight_scale: Tensor,
    weight_per_tensor_scale: Tensor | None,
    activation_per_tensor_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_activation_scale: bool,  # noqa: ARG001
    group_size: int,
    high_first: bool = False,  # noqa: ARG001
) -> Tensor:
    require_group_size(group_size)
    operands = (weight_qdata, weight_scale, weight_per_tensor_scale, activation_per_tensor_scale)
    outputs = check_linear(input, *operands, bias, group_size)
    return input.new_empty((*input.shape[:-1], outputs))


@operator("convrot_nvfp4_prepare_input")
def prepare_input(
    input: Tensor,  # noqa: A002
    activation_per_tensor_scale: Tensor | None,
    dynamic_activation_scale: bool,
    group_size: int,
    activation_fn: str | None = None,
    high_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes ``[rows, K / 2]``, swizzled block scales and the FP32 second level."""
    require_group_size(group_size)
    prepared_shapes(input, activation_fn, group_size)
    validate_level("activation_per_tensor_scale", activation_per_tensor_scale, input.device)
    return select_linear_backend(input.device).prepare_input(
        input,
        activation_per_tensor_scale,
        dynamic_activation_scale,
        activation_fn,
        high_first,
        group_size=group_size,
    )


@fake_of("convrot_nvfp4_prepare_input")
def _(
    input: Tensor,  # noqa: A002
    activation_per_tensor_scale: Tensor | None,
    dynamic_activation_scale: bool,  # noqa: ARG001
    group_size: int,
    activation_fn: str | None = None,
    high_first: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    require_group_size(group_size)
    return fake_prepared(input, activation_per_tensor_scale, activation_fn, group_size)
