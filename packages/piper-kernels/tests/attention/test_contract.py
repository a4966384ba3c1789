"""Operands that dense attention refuses, on the CPU, on meta tensors and in fake mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels import piper_attention, sage_attention_2pp

OPERATORS = {"Piper Attention": piper_attention, "SageAttention2++": sage_attention_2pp}
both = pytest.mark.parametrize("label", OPERATORS)


def operand(batch=1, heads=2, rows=9, head_dim=64, dtype=torch.float16, device="cpu"):
    return torch.zeros(batch, heads, rows, head_dim, dtype=dtype, device=device)


def refused(label, message, *operands, error=ValueError, **options):
    with pytest.raises(error, match=message) as caught:
        OPERATORS[label](*operands, **options)
    assert str(caught.value).startswith(label)


@both
@pytest.mark.parametrize("index", range(3))
def test_each_operand_has_four_axes_a_half_dtype_and_contiguous_features(label, index):
    for bad, message in (
        (operand()[0], "batch, heads, sequence, head_dim"),
        (operand(dtype=torch.float32), "float16 or bfloat16"),
        (operand(rows=64).mT, "head dimension must be contiguous"),
        (operand().to_sparse(), "strided layout"),
    ):
        operands = [operand()] * 3
        operands[index] = bad
        refused(label, message, *operands)


@both
def test_operands_agree(label):
    good = operand()
    refused(label, "share a device", good, operand(device="meta"), good)
    refused(label, "share a dtype", good, good, operand(dtype=torch.bfloat16))
    refused(label, "equal batch", good, operand(batch=2), good)
    refused(label, "key/value lengths", good, operand(rows=8), good)
    refused(label, "head dimensions must match", good, good, operand(head_dim=128))


@both
def test_sizes_and_scales(label):
    for head_dim in (32, 96, 256, 512):
        wide = operand(head_dim=head_dim)
        refused(label, "head dimensions 64 and 128", wide, wide, wide)
    good, empty = operand(), operand(rows=0)
    refused(label, "does not accept empty", empty, good, good)
    refused(label, "does not accept empty", good, empty, empty)
    shorter = operand(rows=4)
    refused(label, "equal query and key lengths", shorter, good, good, is_causal=True)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        refused(label, "finite and positive", good, good, good, scale=scale)


@both
def test_gradients_are_refused_where_they_are_recorded(label):
    good, trained = operand(), operand().requires_grad_()
    refused(label, "inference-only", good, trained, good, error=RuntimeError)
    with torch.no_grad():
        assert OPERATORS[label](good, trained, good).shape == good.shape


@both
def test_checks_come_in_the_documented_order(label):
    float32 = operand(dtype=torch.float32)
    refused(label, "float16 or bfloat16", float32, operand(device="meta"), operand(rows=0))
    other = operand(dtype=torch.bfloat16, heads=3)
    refused(label, "share a dtype", operand(), other, operand())
    wide = operand(rows=0, head_dim=32)
    refused(label, "head dimensions 64 and 128", wide, wide, wide)
    trained = operand().requires_grad_()
    refused(label, "inference", trained, trained, trained, scale=-1.0, error=RuntimeError)


@pytest.mark.parametrize("heads", [(3, 2, 2), (2, 4, 4), (4, 2, 1), (4, 0, 0), (0, 2, 2)])
def test_head_counts_that_do_not_divide_are_refused_in_fake_mode(heads):
    with FakeTensorMode():
        operands = [operand(heads=count) for count in heads]
        refused("Piper Attention", "head", *operands)


def test_sage_has_no_grouped_queries():
    refused(
        "SageAttention2++", "equal batch and head dimensions", operand(), *[operand(heads=1)] * 2
    )


@both
def test_no_heads_are_refused(label):
    refused(label, "head", *[operand(heads=0)] * 3)


@both
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_shapes_are_computed_without_contents(label, device):
    with FakeTensorMode() if device == "fake" else torch.no_grad():
        where = "meta" if device == "meta" else "cpu"
        query = operand(2, 4, 9, 128, torch.bfloat16, where).transpose(1, 2).contiguous()
        query = query.transpose(1, 2)
        key = operand(2, 4, 17, 128, torch.bfloat16, where)
        output = OPERATORS[label](query, key, key)
    assert output.shape == query.shape
    assert output.dtype == torch.bfloat16
    assert output.is_contiguous()
