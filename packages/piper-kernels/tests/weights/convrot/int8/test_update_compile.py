import pytest
import torch

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


def make():
    dense = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    return ConvRotInt8Tensor.from_hp(dense, group_size=16)


def test_updates_compile():
    def update(weight, mat1, mat2, dense):
        weight.addmm_(mat1, mat2, alpha=0.5)
        weight.add_(dense, alpha=2)
        return weight.dequantize()

    operands = (torch.randn(7, 2), torch.randn(2, 64), torch.randn(7, 64))
    eager, compiled = make(), make()
    expected = update(eager, *operands)
    actual = torch.compile(update, backend="aot_eager", fullgraph=True)(compiled, *operands)
    assert torch.equal(actual, expected)
    assert torch.equal(compiled.qdata, eager.qdata)


def read_after_update(a, b, dense):
    a.add_(dense)
    return b.dequantize()


def test_compiled_update_of_a_transpose_fails_loudly():
    weight, dense = make(), torch.randn(7, 64)
    compiled = torch.compile(read_after_update, backend="aot_eager")
    with pytest.raises(Exception, match="aliased inputs that are mutated"):
        compiled(weight, weight.t(), dense)


def test_compiled_update_of_shared_storage_equals_eager():
    def shared():
        first = make()
        return first, ConvRotInt8Tensor(first.qdata, first.scale, 16, torch.float32)

    dense = torch.randn(7, 64)
    expected = read_after_update(*shared(), dense)
    compiled = torch.compile(read_after_update, backend="aot_eager")
    assert torch.equal(compiled(*shared(), dense), expected)


def test_compiled_update_of_one_weight_passed_twice_equals_eager():
    eager, actual, dense = make(), make(), torch.randn(7, 64)
    expected = read_after_update(eager, eager, dense)
    compiled = torch.compile(read_after_update, backend="aot_eager")
    assert torch.equal(compiled(actual, actual, dense), expected)
