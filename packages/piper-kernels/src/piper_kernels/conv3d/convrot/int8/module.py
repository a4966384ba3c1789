"""The ConvRot INT8 convolution as a module."""

from collections.abc import Sequence

from torch import Tensor, nn

from piper_kernels.conv3d.convrot.int8._geometry import Padding, padding_flags
from piper_kernels.conv3d.convrot.int8._operands import check_bias, check_stride
from piper_kernels.conv3d.convrot.int8.op import conv3d, require_filter
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


class ConvRotInt8Conv3d(nn.Module):
    """A causal 3x3x3 convolution with a ConvRot INT8 filter, for inference.

    A state dict with quantized storage is loaded with ``assign=True``, which keeps memory maps.

    Args:
        weight: ``[O, C, 3, 3, 3]`` with an ``act_per_tensor_scale``.
        bias: float16 ``[O]`` on the device of the weight, or ``None``.
        stride: Steps along time, height and width.
        padding: Spatial padding, see :func:`conv3d`.

    Attributes:
        weight: The filter, a parameter without gradient.
        bias: The bias, a parameter without gradient, or ``None``.

    Raises:
        TypeError: The weight is no 5-D ``ConvRotInt8Tensor``.
        ValueError: The weight has no input scale, or bias, stride or padding do not fit.
    """

    weight: ConvRotInt8Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: ConvRotInt8Tensor,
        bias: Tensor | None = None,
        *,
        stride: Sequence[int] = (1, 1, 1),
        padding: Padding,
    ) -> None:
        super().__init__()
        require_filter(weight)
        padding_flags(padding)
        if bias is not None:
            check_bias(bias, weight.shape[0], weight.device)
        self.stride: tuple[int, int, int] = check_stride(stride)
        self.padding: Padding = padding
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        held = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", held)

    def forward(
        self,
        input: Tensor,  # noqa: A002  # the name in torch
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the convolution of ``[N, C, T, H, W]``; see :func:`conv3d`."""
        return conv3d(
            input,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            residual=residual,
        )

    def extra_repr(self) -> str:
        """Return channels, stride and padding."""
        outputs, channels = self.weight.shape[:2]
        return f"{channels}, {outputs}, stride={self.stride}, padding={self.padding}"
