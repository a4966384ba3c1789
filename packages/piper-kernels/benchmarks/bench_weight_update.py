"""In-place weight updates: ``add_`` and ``addmm_`` against the portable PyTorch code."""

from collections.abc import Callable
from typing import Any

import torch
from _harness import INPUT_SETS, Case, device, main, measure, require_as_exact, size
from torch import Tensor

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.int8 import _update_reference as int8_reference
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4 import _update_reference as nvfp4_reference

RANK = 16
DTYPE = torch.bfloat16


def int8_weight(dense: Tensor, group: int) -> Any:
    """Return a ConvRot INT8 weight."""
    return ConvRotInt8Tensor.from_hp(dense, group_size=group)


def nvfp4_weight(dense: Tensor, group: int) -> Any:
    """Return a two-level NVFP4 weight with swizzled scales; group 0 does not rotate."""
    options: Any = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
    if group:
        return ConvRotNVFP4Tensor.from_hp(dense, group_size=group, **options)
    return PiperNVFP4Tensor.from_hp(dense, **options)


def reference_addmm(weight: Any, left: Tensor, right: Tensor, seed: int | None) -> None:
    """Run the portable ``addmm_`` on any device."""
    if isinstance(weight, ConvRotInt8Tensor):
        int8_reference.addmm_(
            weight.qdata, weight.scale, left, right, weight.group_size, 1.0, 1.0, seed
        )
        return
    nvfp4_reference.addmm_(
        weight.qdata,
        weight.scale,
        weight.per_tensor_scale,
        left,
        right,
        getattr(weight, "group_size", 0),
        1.0,
        1.0,
        weight.is_swizzled_scales,
        weight.high_first,
        seed,
    )


def case_addmm(
    label: str, make: Callable[[Tensor, int], Any], shape: tuple[int, int], group: int, seed: int
) -> Case:
    """Return a stochastic LoRA merge of rank 16 into ``[out, in]`` in bf16."""
    name = f"{label} addmm_ rank {RANK} seeded {shape[0]}x{shape[1]} bfloat16"
    dense = torch.randn(shape, dtype=DTYPE, device=device())
    left = torch.randn(shape[0], RANK, dtype=DTYPE, device=device()) * 0.02
    right = torch.randn(RANK, shape[1], dtype=DTYPE, device=device())
    ours = [make(dense, group) for _ in range(INPUT_SETS)]
    theirs = [weight.clone() for weight in ours]

    def piper(index: int) -> None:
        ours[index].addmm_(left, right, rounding_seed=seed)

    def baseline(index: int) -> None:
        reference_addmm(theirs[index], left, right, seed)

    def check() -> None:
        exact = ours[0].dequantize(torch.float32) + left.float() @ right.float()
        piper(0)
        baseline(0)
        ours_dense, theirs_dense = (w.dequantize(torch.float32) for w in (ours[0], theirs[0]))
        require_as_exact(name, ours_dense, theirs_dense, exact)

    stored = sum(getattr(ours[0], inner).nbytes for inner in ours[0].__tensor_flatten__()[0])
    traffic = 2 * stored + left.nbytes + right.nbytes
    return Case(name, traffic, {"piper": piper, "baseline": baseline}, check)


def case_add(shape: tuple[int, int], group: int) -> Case:
    """Return an update of a ConvRot INT8 weight by a dense matrix, to nearest."""
    name = f"ConvRot INT8 g{group} add_ {shape[0]}x{shape[1]} bfloat16"
    dense = torch.randn(shape, dtype=DTYPE, device=device())
    update = torch.randn(shape, dtype=DTYPE, device=device())
    ours = [int8_weight(dense, group) for _ in range(INPUT_SETS)]
    theirs = [weight.clone() for weight in ours]

    def piper(index: int) -> None:
        ours[index].add_(update, alpha=0.25)

    def baseline(index: int) -> None:
        int8_reference.add_(theirs[index].qdata, theirs[index].scale, update, group, 0.25)

    def check() -> None:
        exact = ours[0].dequantize(torch.float32) + 0.25 * update.float()
        piper(0)
        baseline(0)
        ours_dense, theirs_dense = (w.dequantize(torch.float32) for w in (ours[0], theirs[0]))
        require_as_exact(name, ours_dense, theirs_dense, exact)

    traffic = 2 * dense.numel() + 8 * shape[0] + update.nbytes
    return Case(name, traffic, {"piper": piper, "baseline": baseline}, check)


def run(quick: bool) -> dict:
    """Measure every case; small shapes when ``quick``."""
    shape = size((8192, 8192), quick)
    cases = (
        lambda: case_add(shape, 256),
        lambda: case_addmm("ConvRot INT8 g64", int8_weight, shape, 64, 7),
        lambda: case_addmm("NVFP4", nvfp4_weight, shape, 0, 7),
        lambda: case_addmm("ConvRot NVFP4 g64", nvfp4_weight, shape, 64, 7),
    )
    return {"rows": [measure(make(), quick=quick) for make in cases]}


if __name__ == "__main__":
    main(run)
