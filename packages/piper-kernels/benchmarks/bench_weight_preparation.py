"""Rotation and quantization of dense weights: ``from_hp`` against the PyTorch composition."""

from typing import Any

import torch
from _harness import INPUT_SETS, Case, device, main, measure, require_as_exact, size

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import _quantize_reference


def case_int8(shape: tuple[int, int], group: int, dtype: torch.dtype) -> Case:
    """Return ConvRot INT8 preparation of ``[out, in]``."""
    name = f"ConvRot INT8 g{group} from_hp {shape[0]}x{shape[1]} {str(dtype)[6:]}"
    dense = [torch.randn(shape, dtype=dtype, device=device()) for _ in range(INPUT_SETS)]

    def baseline(index: int) -> Any:
        rotated = rotate_groups(dense[index].float(), group)
        return ConvRotInt8Tensor(*dynamic_quantize_rows(rotated), group, dtype)

    def piper(index: int) -> Any:
        return ConvRotInt8Tensor.from_hp(dense[index], group_size=group)

    def check() -> None:
        ours, theirs = (w.dequantize(torch.float32) for w in (piper(0), baseline(0)))
        require_as_exact(name, ours, theirs, dense[0])

    traffic = dense[0].nbytes + dense[0].numel() + 4 * shape[0]
    return Case(name, traffic, {"piper": piper, "baseline": baseline}, check)


def case_nvfp4(shape: tuple[int, int], group: int) -> Case:
    """Return two-level ConvRot NVFP4 preparation of ``[out, in]`` in bf16."""
    name = f"ConvRot NVFP4 g{group} from_hp {shape[0]}x{shape[1]} bfloat16"
    dense = [torch.randn(shape, dtype=torch.bfloat16, device=device()) for _ in range(INPUT_SETS)]
    options: Any = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}

    def baseline(index: int) -> Any:
        qdata, scale, level = _quantize_reference.quantize_two_level(dense[index], group, True)
        return ConvRotNVFP4Tensor(
            qdata, scale, 16, torch.bfloat16, group, level, is_swizzled_scales=True
        )

    def piper(index: int) -> Any:
        return ConvRotNVFP4Tensor.from_hp(dense[index], group_size=group, **options)

    def check() -> None:
        ours, theirs = (w.dequantize(torch.float32) for w in (piper(0), baseline(0)))
        require_as_exact(name, ours, theirs, dense[0])

    traffic = dense[0].nbytes + dense[0].numel() // 2 + dense[0].numel() // 16
    return Case(name, traffic, {"piper": piper, "baseline": baseline}, check)


def run(quick: bool) -> dict:
    """Measure every case; small shapes when ``quick``."""
    wide, tall = size((8192, 8192), quick), size((16384, 2048), quick)
    cases = (
        lambda: case_int8(wide, 256, torch.bfloat16),
        lambda: case_int8(wide, 64, torch.bfloat16),
        lambda: case_int8(tall, 64, torch.float32),
        lambda: case_nvfp4(wide, 64),
    )
    return {"rows": [measure(make(), quick=quick) for make in cases]}


if __name__ == "__main__":
    main(run)
