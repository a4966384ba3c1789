"""Tensor-parallel linears over one quantized weight: output rows, then input channels.

    python examples/piper_kernels/tensor_parallel.py --processes 2

Every process holds the same quantized full weight, keeps its shard and gives it to PyTorch's
ColwiseParallel or RowwiseParallel. Processes talk over gloo on CPU, over NCCL with --device cuda.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.sharding import shard_quantized_weight


def parallel_linear(
    full_weight: ConvRotInt8Tensor, bias: Tensor, mesh: DeviceMesh, dim: int
) -> nn.Module:
    """Return a linear whose weight is split over a 1-D mesh.

    Args:
        full_weight: Quantized ``[out, in]``, the same in every process.
        bias: ``[out]``.
        mesh: The processes; their number must divide the split dimension.
        dim: 0 splits output rows (ColwiseParallel), 1 input channels (RowwiseParallel).
    """
    parts, rank = mesh.size(), mesh.get_local_rank()
    length = full_weight.shape[dim] // parts
    if length * parts != full_weight.shape[dim]:
        raise ValueError(f"{parts} processes do not divide {full_weight.shape[dim]} evenly")
    local_weight = shard_quantized_weight(
        full_weight, dim=dim, start=rank * length, length=length
    ).to(mesh.device_type)
    out_features, in_features = full_weight.shape
    linear = nn.Linear(in_features, out_features, bias=True, device="meta")
    linear.weight = nn.Parameter(
        DTensor.from_local(
            local_weight,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=full_weight.shape,
            stride=full_weight.stride(),
        ),
        requires_grad=False,
    )
    local_bias = bias.to(mesh.device_type)
    if dim == 0:
        local_bias = local_bias.narrow(0, rank * length, length).contiguous()
    linear.bias = nn.Parameter(
        DTensor.from_local(
            local_bias,
            mesh,
            [Shard(0) if dim == 0 else Replicate()],
            run_check=False,
            shape=bias.shape,
            stride=bias.stride(),
        ),
        requires_grad=False,
    )
    return parallelize_module(linear, mesh, ColwiseParallel() if dim == 0 else RowwiseParallel())


def run(rank: int, world_size: int, device: str, folder: str) -> None:
    """Check a two-layer network in one process of the group."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=(Path(folder) / "store").as_uri(), rank=rank, world_size=world_size
    )
    mesh = init_device_mesh(device, (world_size,))
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(192, 128, generator=generator), torch.randn(96, 192, generator=generator)
    up_bias, down_bias = (torch.randn(n, generator=generator) for n in (192, 96))
    x = torch.randn(5, 128, generator=generator).to(device)
    # 48 input channels would not align to groups of 64, so the second layer uses 16.
    weights = [
        ConvRotInt8Tensor.from_hp(up, group_size=64),
        ConvRotInt8Tensor.from_hp(down, group_size=16),
    ]
    with torch.no_grad():
        hidden = parallel_linear(weights[0], up_bias, mesh, dim=0)(x)
        output = parallel_linear(weights[1], down_bias, mesh, dim=1)(hidden)
        first = nn.functional.linear(x, weights[0].to(device), up_bias.to(device))
        expected = nn.functional.linear(first, weights[1].to(device), down_bias.to(device))
    error = ((output - expected).norm() / expected.norm()).item()
    if rank == 0:
        print(f"{world_size} processes, each with hidden {tuple(hidden.shape)}")
        print(f"relative difference to one process: {error:.5f}")
    # Each process scales its own input channels, so codes may differ; values may not.
    if not error < 0.02:
        raise SystemExit(f"rank {rank} is off by {error:.4f}")
    dist.destroy_process_group()


def main() -> None:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(description="Run a tensor-parallel network.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            run,
            args=(arguments.processes, arguments.device, folder),
            nprocs=arguments.processes,
        )


if __name__ == "__main__":
    main()
