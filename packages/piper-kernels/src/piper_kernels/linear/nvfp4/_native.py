"""Block-scaled products of PyTorch for targets whose matrix units multiply NVFP4.

Preparation and the weight-only product are those of the Triton backend. The product goes to
``aten::_scaled_mm_v2``: block scales of 1x16 in the 128x4 layout and an FP32 scalar for each
operand, accumulated in FP32.
"""

import torch
from torch import Tensor

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.nvfp4.triton import TritonBackend
from piper_kernels.weights.nvfp4._layout import SCALE_ROW_TILE

MIN_TORCH = (2, 14)
ARCHITECTURES = ("sm_100", "sm_120")
MAX_WORKSPACE = 32 * 2**20
# Rows and inner size of float4 operands that the library takes.
_ALIGNED_OUTPUTS, _ALIGNED_FEATURES = 16, 32


def support(target: AcceleratorTarget | None) -> tuple[bool, str]:
    """Return whether PyTorch multiplies NVFP4 on a target, and the reason when it does not."""
    if target is None or target.architecture not in ARCHITECTURES:
        name = "no accelerator" if target is None else target.architecture
        return False, f"native NVFP4 products need {' or '.join(ARCHITECTURES)}, this is {name}"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MIN_TORCH or not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        return False, f"native NVFP4 products need torch 2.14 or newer, this is {torch.__version__}"
    return True, ""


class NativeBackend(TritonBackend):
    """Multiplies prepared inputs by block-scaled products of PyTorch."""

    def linear(
        self,
        input: Tensor,  # noqa: A002  # the name of F.linear
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        activation_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        dynamic_activation_scale: bool,
        high_first: bool = False,
        *,
        group_size: int = 0,
    ) -> Tensor:
        """Return the linear of a floating input that is quantized first."""
        prepared = self.prepare_input(
            input,
            activation_per_tensor_scale,
            dynamic_activation_scale,
            None,
            high_first,
            group_size=group_size,
        )
        weight = (weight_qdata, weight_scale, weight_per_tensor_scale)
        output = self.linear_prepared(*prepared, *weight, bias, input.dtype)
        return output.view(*input.shape[:-1], weight_qdata.shape[0])

    def linear_prepared(
        self,
        input_qdata: Tensor,
        input_scale: Tensor,
        input_per_tensor_scale: Tensor,
        weight_qdata: Tensor,
        weight_scale: Tensor,
        weight_per_tensor_scale: Tensor | None,
        bias: Tensor | None,
        logical_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the linear of a prepared input.

        Without a bias, or with one of the dtype of a 16-bit result, the product scales, biases
        and rounds. Other biases are added to FP32 products of row chunks, which take at most
        32 MiB or one tile of 128 rows.
        """
        rows, outputs = input_qdata.shape[0], weight_qdata.shape[0]
        aligned = outputs % _ALIGNED_OUTPUTS == 0 and (
            2 * weight_qdata.shape[1] % _ALIGNED_FEATURES == 0
        )
        if not rows or not outputs or not aligned:
            return super().linear_prepared(
                input_qdata,
                input_scale,
                input_per_tensor_scale,
                weight_qdata,
                weight_scale,
                weight_per_tensor_scale,
                bias,
                logical_dtype,
                out=out,
            )
        weight_level = weight_per_tensor_scale
        if weight_level is None:
            weight_level = torch.ones_like(input_per_tensor_scale)
        levels = (input_per_tensor_scale, weight_level)
        weight = (weight_qdata, weight_scale)
        if bias is None or (bias.dtype == logical_dtype and logical_dtype != torch.float32):
            dense = None if bias is None else bias.contiguous()
            result = scaled_product(input_qdata, input_scale, *weight, levels, dense, logical_dtype)
            return result if out is None else out.copy_(result)
        if out is None:
            out = input_qdata.new_empty((rows, outputs), dtype=logical_dtype)
        step = max(1, MAX_WORKSPACE // (4 * outputs * SCALE_ROW_TILE)) * SCALE_ROW_TILE
        for first in range(0, rows, step):
            part = slice(first, min(rows, first + step))
            # Scales of a tile of 128 rows are 32 rows of the swizzled layout.
            scale = input_scale[first // 4 : -(-part.stop // SCALE_ROW_TILE) * 32]
            product = scaled_product(input_qdata[part], scale, *weight, levels, None, torch.float32)
            out[part].copy_(product.add_(bias))
        return out


def scaled_product(
    input_qdata: Tensor,
    input_scale: Tensor,
    weight_qdata: Tensor,
    weight_scale: Tensor,
    levels: tuple[Tensor, Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``[rows, outputs]`` of packed operands with swizzled block scales."""
    from torch.nn.functional import ScalingType, SwizzleType

    recipe = [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value]
    swizzle = [SwizzleType.SWIZZLE_32_4_4.value, SwizzleType.NO_SWIZZLE.value]
    return torch.ops.aten._scaled_mm_v2.default(
        input_qdata.view(torch.float4_e2m1fn_x2),
        weight_qdata.view(torch.float4_e2m1fn_x2).t(),
        [input_scale, levels[0]],
        recipe,
        swizzle,
        [weight_scale, levels[1]],
        recipe,
        swizzle,
        bias,
        dtype,
    )
