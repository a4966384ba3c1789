"""Checks that hold for the wrapper of every weight format: views, copies, state, shards."""

import copy
import io
import tempfile
from pathlib import Path

import pytest
import torch

from piper_kernels.weights.io import load_quantized, save_quantized
from piper_kernels.weights.sharding import shard_quantized_weight


def inner_tensors(weight):
    return {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}


def same_bytes(left, right):
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    flat = (side.reshape(-1).contiguous().view(torch.uint8) for side in (left, right))
    return torch.equal(*flat)


def assert_same_storage(actual, expected):
    names, attributes = expected.__tensor_flatten__()
    assert actual.__tensor_flatten__() == (names, attributes)
    for name in names:
        assert same_bytes(getattr(actual, name), getattr(expected, name)), name


def assert_aliases(actual, expected):
    assert actual is not expected
    assert type(actual) is type(expected)
    for name, inner in inner_tensors(expected).items():
        assert getattr(actual, name).data_ptr() == inner.data_ptr()


def wrapper_checks(make_weight, serializable=()):
    """Return operation name to check, for the weights that ``make_weight(case)`` returns.

    ``serializable`` names the classes, beside the weight's own, that a checkpoint of such a
    weight may hold.
    """

    def views(case):
        weight = make_weight(case)
        rows, features = weight.shape
        for view in (
            weight.view(rows, features),
            weight.view(-1, features),
            weight.view(rows, -1),
            weight.view_as(weight),
            weight.detach(),
            weight.as_strided(weight.shape, weight.stride()),
            weight.permute(0, 1),
            weight.transpose(1, 1),
        ):
            assert_aliases(view, weight)
            assert_same_storage(view, weight)
            assert (view.shape, view.stride()) == (weight.shape, weight.stride())
            assert torch._C._is_alias_of(view, weight)
        with pytest.raises((NotImplementedError, RuntimeError)):
            weight.view(features, rows) if rows != features else weight.view(-1)
        with pytest.raises(NotImplementedError):
            weight[0]

    def transpose(case):
        weight = make_weight(case)
        dense = weight.dequantize()
        for transposed in (
            weight.t(),
            weight.mT,
            weight.transpose(0, 1),
            weight.permute(-1, -2),
            weight.as_strided(weight.shape[::-1], weight.stride()[::-1]),
        ):
            assert transposed.shape == weight.shape[::-1]
            assert transposed.stride() == weight.stride()[::-1]
            assert_aliases(transposed, weight)
            assert same_values(transposed.dequantize(), dense.t())
            back = transposed.t()
            assert (back.shape, back.stride()) == (weight.shape, weight.stride())
            assert_same_storage(back, weight)
        assert same_values(copy.deepcopy(weight.t()).dequantize(), dense.t())

    def clone(case):
        weight = make_weight(case)
        source = weight.t() if case.option & 1 else weight
        expected = copy.deepcopy(source)
        for duplicate in (source.clone(), copy.deepcopy(source), source.to(copy=True)):
            for inner in inner_tensors(duplicate).values():
                inner.view(torch.uint8).fill_(0) if inner.ndim else inner.fill_(7)
            assert_same_storage(source, expected)
            duplicate.copy_(source)
            assert_same_storage(duplicate, expected)

    def state_dict(case):
        weight = make_weight(case)
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        buffer.seek(0)
        with torch.serialization.safe_globals([type(weight), *serializable]):
            state = torch.load(buffer, weights_only=True)
        other = torch.nn.Module()
        other.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        other.load_state_dict(state, assign=True)
        assert other.weight.dtype == weight.dtype
        assert_same_storage(other.weight, weight)
        twin = torch.nn.Module()
        twin.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        inner = inner_tensors(twin.weight)
        inner["qdata"].zero_()
        twin.load_state_dict(module.state_dict())
        assert_same_storage(twin.weight, weight)
        assert all(getattr(twin.weight, name) is kept for name, kept in inner.items())

    def shard(case):
        weight = make_weight(case)
        dim = case.option & 1
        unit = max(case.group, 16) if dim else 1
        blocks = weight.shape[dim] // unit
        start = case.option // 2 % blocks
        length = 1 + case.seed % (blocks - start)
        piece = shard_quantized_weight(weight, dim=dim, start=start * unit, length=length * unit)
        exact = weight.dequantize().narrow(dim, start * unit, length * unit)
        assert same_values(piece.dequantize(), exact)
        assert piece.qdata.data_ptr() != weight.qdata.data_ptr()

    def file(case):
        weight = make_weight(case)
        dense = case.dense()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.safetensors"
            save_quantized({"layer.weight": weight, "bias": dense}, path, layout="piper")
            loaded = load_quantized(path)
            assert loaded.keys() == {"layer.weight", "bias"}
            assert same_bytes(loaded["bias"], dense.contiguous())
            read = loaded["layer.weight"]
            assert (type(read), read.shape, read.dtype) == (
                type(weight),
                weight.shape,
                weight.dtype,
            )
            assert_same_storage(read, weight)

    return {
        "file": file,
        "views": views,
        "transpose": transpose,
        "clone": clone,
        "state dict": state_dict,
        "shard": shard,
    }


def same_values(left, right):
    """Equal values, NaN equal to NaN and zero to negative zero."""
    return left.shape == right.shape and torch.equal(
        left.nan_to_num(12345.0), right.nan_to_num(12345.0)
    )
