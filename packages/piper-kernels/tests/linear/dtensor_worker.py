"""Runs linears on DTensors in two processes and writes what went wrong to a JSON file.

Usage: dtensor_worker.py FOLDER. Rank 0 writes FOLDER/result.json: case name to "ok" or the error.
"""

import itertools
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.sharding import shard_quantized_weight

WORLD = 2
FEATURES = 64
PLACEMENTS = {
    "replicated": (Replicate(), Replicate(), Replicate(), Replicate()),
    "rows": (Shard(0), Replicate(), Shard(0), Shard(1)),
    "columns": (Shard(1), Shard(1), Replicate(), Partial()),
}
# Format, mode, bias. In inference mode DTensor gathers the whole weight for a replicated bias
# and column shards, which quantized weights refuse; torch.no_grad() does not.
CASES = (
    ("int8", "eager", False),
    ("int8-static", "eager", True),
    ("int8", "compiled", True),
    ("int8", "inference", False),
    ("nvfp4", "eager", True),
    ("convrot-nvfp4", "eager", False),
)
MAKERS = {
    "int8": lambda dense: ConvRotInt8Tensor.from_hp(dense, group_size=16),
    "int8-static": lambda dense: ConvRotInt8Tensor.from_hp(
        dense, group_size=16, act_per_tensor_scale=torch.tensor(0.03)
    ),
    "nvfp4": lambda dense: PiperNVFP4Tensor.from_hp(
        dense, compute_per_tensor_scale=True, is_swizzled_scales=True
    ),
    "convrot-nvfp4": lambda dense: ConvRotNVFP4Tensor.from_hp(
        dense, group_size=16, compute_per_tensor_scale=True, is_swizzled_scales=True
    ),
}


def make_weight(fmt, rows):
    generator = torch.Generator().manual_seed(1)
    return MAKERS[fmt](torch.randn(rows, FEATURES, generator=generator))


def shard_bounds(size, rank):
    """The interval that torch.chunk gives to a rank: the first ones are larger."""
    length = -(-size // WORLD)
    start = min(rank * length, size)
    return start, min(length, size - start)


def local_part(tensor, placement, rank):
    if not isinstance(placement, Shard):
        return tensor
    start, length = shard_bounds(tensor.shape[placement.dim], rank)
    if isinstance(tensor, ConvRotInt8Tensor | PiperNVFP4Tensor):
        return shard_quantized_weight(tensor, dim=placement.dim, start=start, length=length)
    return tensor.narrow(placement.dim, start, length).contiguous()


def distribute(tensor, placement, mesh, rank):
    return DTensor.from_local(
        local_part(tensor, placement, rank),
        mesh,
        [placement],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def check(mesh, rank, kind, fmt, mode, *, with_bias, rows):
    of_weight, of_input, of_bias, of_output = PLACEMENTS[kind]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, FEATURES, generator=generator)
    bias = torch.randn(rows, generator=generator) if with_bias else None
    weight = make_weight(fmt, rows)
    linear = functional.linear
    if mode == "compiled":
        torch._dynamo.reset()
        linear = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(mode == "inference"), torch.no_grad():
        result = linear(
            distribute(x, of_input, mesh, rank),
            distribute(weight, of_weight, mesh, rank),
            None if bias is None else distribute(bias, of_bias, mesh, rank),
        )
        assert result.placements == (of_output,), result.placements
        assert result.shape == (5, rows), result.shape
        parts = [
            functional.linear(
                local_part(x, of_input, r),
                local_part(weight, of_weight, r),
                None if bias is None or kind == "columns" else local_part(bias, of_bias, r),
            )
            for r in range(WORLD)
        ]
        if not (with_bias and kind == "columns"):
            assert torch.equal(result.to_local(), parts[rank])
        whole = result.full_tensor()
        if kind == "columns":
            expected = sum(parts) if bias is None else sum(parts) + bias
            torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-5)
        else:
            assert torch.equal(whole, torch.cat(parts, -1) if kind == "rows" else parts[0])
        unsharded = functional.linear(x, weight, bias)
        assert (whole - unsharded).norm() < 0.02 * unsharded.norm()


def work(rank, folder):
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    results = {}
    for kind, (fmt, mode, with_bias) in itertools.product(PLACEMENTS, CASES):
        name = f"{kind}-{fmt}-{mode}" + ("-bias" if with_bias else "")
        try:
            # Seven rows do not divide by two: the global shape must be passed, not guessed.
            check(mesh, rank, kind, fmt, mode, with_bias=with_bias, rows=7)
            outcome = "ok"
        except Exception:
            outcome = traceback.format_exc()
        outcomes = [None] * WORLD
        dist.all_gather_object(outcomes, outcome)
        results[name] = next((text for text in outcomes if text != "ok"), "ok")
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(Path(sys.argv[1]),), nprocs=WORLD)
