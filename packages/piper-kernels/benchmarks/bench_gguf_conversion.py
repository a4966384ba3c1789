"""GGUF rows to ConvRot weights: ``copy_from_gguf_`` against decoding to a dense matrix."""

from collections.abc import Callable
from typing import Any

import torch
from _harness import INPUT_SETS, Case, device, main, measure, require_as_exact, size
from torch import Tensor

from piper_kernels.gguf import GGUF_QUANT_SIZES, GGUFQuantizationType, dequantize
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor

GROUP = 64
# Byte offsets of the fp16 factors in a block; random bytes there could be NaN or huge.
_FACTORS = {GGUFQuantizationType.Q8_0: (0,), GGUFQuantizationType.Q4_K: (0, 2)}


def random_rows(kind: GGUFQuantizationType, shape: tuple[int, int]) -> Tensor:
    """Return packed rows ``[out, row_bytes]`` with random codes and factors near 0.01."""
    elements, block_bytes = GGUF_QUANT_SIZES[kind]
    blocks = torch.randint(
        0, 256, (shape[0], shape[1] // elements, block_bytes), dtype=torch.uint8, device=device()
    )
    for offset in _FACTORS[kind]:
        factor = torch.rand(blocks.shape[:2], device=device()) * 0.01 + 0.005
        blocks[..., offset : offset + 2] = factor.half().unsqueeze(-1).view(torch.uint8)
    return blocks.flatten(1)


def int8_weight(dense: Tensor) -> Any:
    """Return a ConvRot INT8 weight."""
    return ConvRotInt8Tensor.from_hp(dense, group_size=GROUP)


def nvfp4_weight(dense: Tensor) -> Any:
    """Return a two-level ConvRot NVFP4 weight with swizzled scales."""
    return ConvRotNVFP4Tensor.from_hp(
        dense, group_size=GROUP, compute_per_tensor_scale=True, is_swizzled_scales=True
    )


def case(
    label: str, kind: GGUFQuantizationType, make: Callable[[Tensor], Any], shape: tuple[int, int]
) -> Case:
    """Return the refill of a weight ``[out, in]`` from packed rows."""
    name = f"{kind.name} to {label} copy_from_gguf_ {shape[0]}x{shape[1]}"
    packed = [random_rows(kind, shape) for _ in range(INPUT_SETS)]
    weight = make(dequantize(packed[0], kind)).to(torch.bfloat16)
    options: Any = {"quant_type": kind, "allow_cpu": device().type == "cpu"}
    if isinstance(weight, ConvRotNVFP4Tensor):
        options["compute_per_tensor_scale"] = True

    def piper(index: int) -> None:
        weight.copy_from_gguf_(packed[index], **options)

    def baseline(index: int) -> Any:
        return make(dequantize(packed[index], kind))

    def check() -> None:
        piper(1)
        expected = baseline(1).dequantize(torch.float32)
        exact = dequantize(packed[1], kind)
        require_as_exact(name, weight.dequantize(torch.float32), expected, exact)

    stored = sum(getattr(weight, inner).nbytes for inner in weight.__tensor_flatten__()[0])
    traffic = packed[0].nbytes + stored
    return Case(name, traffic, {"piper": piper, "baseline": baseline}, check)


def run(quick: bool) -> dict:
    """Measure every case; small shapes when ``quick``."""
    shape = size((8192, 8192), quick)
    q8, q4 = GGUFQuantizationType.Q8_0, GGUFQuantizationType.Q4_K
    cases = (
        lambda: case("ConvRot INT8 g64", q8, int8_weight, shape),
        lambda: case("ConvRot INT8 g64", q4, int8_weight, shape),
        lambda: case("ConvRot NVFP4 g64", q4, nvfp4_weight, shape),
    )
    return {"rows": [measure(make(), quick=quick) for make in cases]}


if __name__ == "__main__":
    main(run)
