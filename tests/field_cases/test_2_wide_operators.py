"""Tensors, in operators: their storage, and offsets past 32 bits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

HERE = Path(__file__).parent
SAMPLES = HERE.parents[1] / "packages/piper-kernels/tests/operators/operator_samples.py"


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def samples():
    """Operands of every registered operator outside of attention."""
    spec = importlib.util.spec_from_file_location("operator_samples", SAMPLES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.samples("cpu")


def storages(values):
    """Storages of the tensors that hold something, as comparable numbers."""
    found = values if isinstance(values, tuple | list) else (values,)
    tensors = [value for value in found if isinstance(value, torch.Tensor) and value.numel()]
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def test_case_37_no_operator_returns_one_storage_twice(samples):
    """No operator returns the same storage twice, or one of its arguments.

    Handled in piper_kernels.weights, piper_kernels.linear, piper_kernels.conv3d,
    piper_kernels.fusions.
    """
    assert len(samples) > 30
    for sample in samples:
        arguments = tuple(
            value.clone() if isinstance(value, torch.Tensor) else value
            for value in sample.arguments
        )
        returned = storages(sample.overload(*arguments))
        assert len(set(returned)) == len(returned), sample
        assert not set(returned) & set(storages(arguments)), sample


def test_case_38_no_fake_implementation_returns_its_argument(samples):
    """Fake implementations return fresh tensors, never an argument or a part of it.

    Handled in piper_kernels.weights, piper_kernels.linear, piper_kernels.conv3d,
    piper_kernels.fusions.
    """
    with FakeTensorMode() as mode:
        for sample in samples:
            arguments = tuple(
                mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for value in sample.arguments
            )
            returned = sample.overload(*arguments)
            outputs = returned if isinstance(returned, tuple) else (returned,)
            assert all(out is None or isinstance(out, torch.Tensor) for out in outputs), sample
            found = storages(outputs)
            assert len(set(found)) == len(found), sample
            assert not set(found) & set(storages(arguments)), sample


@pytest.fixture(scope="module")
def wide_offsets():
    """What the checks of far offsets print, in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    found = subprocess.run(
        [sys.executable, str(HERE / "wide_offset_checks.py")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout + found.stderr


def test_case_46_products_past_32_bit_offsets(wide_offsets):
    """An INT8 product reads and writes rows that lie beyond 2**31 elements.

    Handled in piper_kernels.linear.convrot.int8.
    """
    assert "linear passed" in wide_offsets, wide_offsets


def test_case_47_strided_queries_past_32_bit_offsets(wide_offsets):
    """Attention reads views of a fused projection that lie beyond 2**31 elements.

    Handled in piper_kernels.attention._preparation.
    """
    assert "attention passed" in wide_offsets, wide_offsets


def test_case_49_random_numbers_past_32_bit_offsets(wide_offsets):
    """Stochastic rounding draws by the 64-bit offset and repeats nothing after 2**32 elements.

    Handled in piper_kernels.stochastic_quantization.
    """
    assert "draws passed" in wide_offsets, wide_offsets


@pytest.mark.gpu
@pytest.mark.device_memory(gib=24)
def test_case_46_every_row_of_a_product_is_written(large_device_memory):
    """All rows of an 80,000 by 28,672 product are written, and nothing around it.

    Handled in piper_kernels.linear.convrot.int8.
    """
    weight = ConvRotInt8Tensor.from_hp(normal(28_672, 64, dtype=torch.bfloat16), group_size=64)
    x = normal(80_000, 64, dtype=torch.bfloat16).cuda()
    found = functional.linear(x, weight.cuda())
    for first in (0, 37_000, 74_898, 79_900):
        part = slice(first, first + 100)
        assert torch.equal(found[part], functional.linear(x[part], weight.cuda()))
