"""Networks of distributed tensors: the row views of their linears do not hide them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from piper_kernels.fusions.convrot_int8_swiglu_ffn import convrot_int8_swiglu_ffn_compile_options
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


@pytest.fixture
def mesh(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def block(x, gate, value, down):
    hidden = functional.silu(functional.linear(x, gate)) * functional.linear(x, value)
    return functional.linear(hidden, down)


def test_a_distributed_network_is_fused(graph_capture, mesh):
    def place(tensor):
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    generator = torch.Generator().manual_seed(1)
    local = [
        ConvRotInt8Tensor.from_hp(
            (torch.randn(*shape, generator=generator) / 8).bfloat16(), group_size=16
        )
        for shape in ((64, 32), (64, 32), (32, 64))
    ]
    x = torch.randn(2, 9, 32, generator=generator).bfloat16()
    options = convrot_int8_swiglu_ffn_compile_options()
    actual, capture = graph_capture.run(
        block, place(x), *(place(weight) for weight in local), options=options
    )
    assert capture.targets == ["convrot_int8_swiglu_ffn"]
    with torch.no_grad():
        expected = block(x, *local)
    assert graph_capture.relative_error(actual.to_local(), expected) < 0.02


@pytest.mark.parametrize("sharded", [False, True])
def test_distributed_heads_are_fused(graph_capture, mesh, monkeypatch, sharded):
    """Heads are local between the projections; their views and wrappers do not matter."""
    from piper_kernels import SparsePiperAttention
    from piper_kernels.fusions.convrot_int8_sparse_piper import (
        _compile,
        convrot_int8_sparse_piper_compile_options,
    )

    monkeypatch.setattr(_compile, "supports_target", lambda *_: (True, ""))
    attention = SparsePiperAttention((0.5, 1.0))
    generator = torch.Generator().manual_seed(2)

    def turn(x, norm, cos, sin):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
        x = wide.to(x.dtype)
        low, high = x.chunk(2, -1)
        cos, sin = (table.to(x.dtype)[None, :, None] for table in (cos, sin))
        return x * cos + torch.cat((-high, low), -1) * sin

    def run(x, norm, cos, sin, q, k, v, out):
        distributed = isinstance(x, DTensor)
        heads = [functional.linear(x, weight) for weight in (q, k, v)]
        heads = [part.to_local() if distributed else part for part in heads]
        query, key, value = (part.unflatten(-1, (-1, 64)) for part in heads)
        query, key = (turn(part, norm, cos, sin) for part in (query, key))
        merged = attention(query, key, value, sparse_key_blocks=2).flatten(2)
        if distributed:
            merged = DTensor.from_local(merged, mesh, [Shard(2) if sharded else Replicate()],
                                        run_check=False)  # fmt: skip
        return functional.linear(merged, out)

    def place(tensor, placement):
        return DTensor.from_local(tensor, mesh, [placement], run_check=False)

    local = [
        ConvRotInt8Tensor.from_hp(
            (torch.randn(*shape, generator=generator) / 8).bfloat16(), group_size=64
        )
        for shape in ((128, 64), (128, 64), (128, 64), (48, 128))
    ]
    columns, rows = (Shard(0), Shard(1)) if sharded else (Replicate(), Replicate())
    weights = [*(place(weight, columns) for weight in local[:3]), place(local[3], rows)]
    x = torch.randn(2, 150, 64, generator=generator).bfloat16()
    angles = torch.randn(150, 32, generator=generator)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    tables = (torch.rand(64, generator=generator) + 0.5, cos, sin)
    options = convrot_int8_sparse_piper_compile_options()
    actual, capture = graph_capture.run(
        run, place(x, Replicate()), *tables, *weights, options=options
    )
    name = "convrot_int8_sparse_piper"
    assert capture.targets == [
        "convrot_int8_prepare_input",
        f"{name}_project_key",
        "convrot_int8_dequantized_input_mean",
        f"{name}_project_value",
        f"{name}_projected_query_attention_output",
    ]
    with torch.no_grad():
        expected = run(x, *tables, *local)
    assert graph_capture.relative_error(actual.to_local(), expected) < 0.025
