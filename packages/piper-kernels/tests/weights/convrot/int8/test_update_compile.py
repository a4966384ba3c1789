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
