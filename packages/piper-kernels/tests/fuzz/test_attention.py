"""Fuzz of the attention operators: against FP64, and with operands that do not fit."""

import random

import pytest
import torch
from fuzz_files import is_whole_run, run_cases

from piper_kernels import SparsePiperAttention, piper_attention, sage_attention_2pp

OPERATORS = {"piper": piper_attention, "sage": sage_attention_2pp}
LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 193)
LAYOUTS = ("contiguous", "heads last but one", "fused", "every second row")
VALUES = ("normal", "zeros", "tiny", "large", "constant", "outlier row", "outlier column", "sparse")
FAULTS = ("dtype", "rank", "head_dim", "keys", "stride", "gradient", "empty", "scale", "heads")


def make_rows(draw, shape, dtype, kind):
    """Return values ``[batch, heads, rows, head_dim]`` of a kind."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**32)))
    if kind == "zeros":
        rows.zero_()
    elif kind == "tiny":
        rows.mul_(1e-6)
    elif kind == "large":
        rows.clamp_(-3, 3).mul_(2e4 if dtype == torch.float16 else 1e12)
    elif kind == "constant":
        rows.fill_(-0.7)
    elif kind == "outlier row":
        rows[:, :, shape[2] // 2].mul_(500)
    elif kind == "outlier column":
        rows[..., 5].mul_(100)
    elif kind == "sparse":
        rows.mul_(torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.02)
    return rows.to(dtype)


def lay_out(rows, layout):
    """Return a tensor with the values of ``rows`` and other strides; what lies between is NaN."""
    batch, heads, length, width = rows.shape
    if layout == "heads last but one":
        return rows.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        store = rows.new_full((batch, length, 3, heads, width), torch.nan)
        store[:, :, 1] = rows.transpose(1, 2)
        return store[:, :, 1].transpose(1, 2)
    if layout == "every second row":
        store = rows.new_full((batch, heads, 2 * length, width), torch.nan)
        store[:, :, ::2] = rows
        return store[:, :, ::2]
    return rows


def exact(query, key, value, scale, is_causal):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.mT * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value


def assert_attention(found, operands, scale, is_causal, kinds):
    """Check a result: finite, within the values of its head, and near FP64 where that is defined.

    A code of a probability is off by up to half of 1/255 of the largest one in a tile of 64 keys,
    which adds up to an eighth of the largest value. Codes of huge logits choose among nearly equal
    keys as they round, so the distance to FP64 is judged for logits of ordinary size.
    """
    query, key, value = operands
    groups = query.shape[1] // key.shape[1]
    assert found.shape == query.shape
    assert found.dtype == query.dtype
    assert found.isfinite().all()
    wide = value.double().repeat_interleave(groups, 1)
    slack = 0.15 * wide.abs().amax(-2, keepdim=True) + 0.02 * wide.abs().amax() + 1e-6
    assert (found.double() <= wide.amax(-2, keepdim=True) + slack).all()
    assert (found.double() >= wide.amin(-2, keepdim=True) - slack).all()
    if set(kinds[:2]) <= {"normal", "zeros", "tiny", "constant", "sparse"}:
        expected = exact(query, key, value, scale, is_causal)
        size = wide.abs().amax().clamp(min=1e-6)
        assert (found.double() - expected).abs().max() <= 0.15 * size


def dense_case(draw):
    """Return an operator, its operands in plain storage, and its options."""
    name = draw.choice(sorted(OPERATORS))
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * (draw.choice([1, 2, 3]) if name == "piper" else 1)
    is_causal = draw.random() < 0.4
    queries = draw.choice(LENGTHS)
    keys = queries if is_causal else draw.choice(LENGTHS)
    width, batch = draw.choice([64, 128]), draw.choice([1, 1, 2])
    dtype = draw.choice([torch.float16, torch.bfloat16])
    kinds = [draw.choice(VALUES) for _ in range(3)]
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    shapes = [(batch, *size, width) for size in sizes]
    operands = [
        make_rows(draw, shape, dtype, kind) for shape, kind in zip(shapes, kinds, strict=True)
    ]
    scale = draw.choice([None, 0.05, 1.0])
    return name, operands, {"scale": scale, "is_causal": is_causal}, kinds


def test_dense_attention():
    def check(draw):
        name, operands, options, kinds = dense_case(draw)
        operator = OPERATORS[name]
        views = [lay_out(rows, draw.choice(LAYOUTS)) for rows in operands]
        found = operator(*views, **options)
        assert torch.equal(found, operator(*operands, **options))
        scale = operands[0].shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        assert_attention(found, operands, scale, options["is_causal"], kinds)
        return "normal" in kinds

    outcomes = run_cases("attention", 0.15, check, __file__)
    assert not is_whole_run() or any(outcomes)


def break_operands(draw, operands, options):
    """Make one thing wrong, in place; return what."""
    fault, which = draw.choice(FAULTS), draw.randrange(3)
    rows = operands[which]
    if fault == "dtype":
        operands[which] = rows.to(draw.choice([torch.float32, torch.int8, torch.float64]))
    elif fault == "rank":
        operands[which] = draw.choice([rows[0], rows[None], rows.flatten()])
    elif fault == "head_dim":
        operands[which] = rows[..., : draw.choice([1, 32, 63])]
    elif fault == "keys":
        operands[1] = torch.cat([operands[1]] * 2, 2)
    elif fault == "stride":
        operands[which] = rows.mT.contiguous().mT if rows.shape[2] > 1 else rows.float()
    elif fault == "gradient":
        operands[which] = rows.clone().requires_grad_()
    elif fault == "empty":
        operands[:] = [x[:, :, :0] for x in operands]
    elif fault == "scale":
        options["scale"] = draw.choice([0.0, -1.0, float("nan"), float("inf")])
    else:
        operands[2] = torch.cat([operands[2]] * 2, 1)
    return fault


def test_dense_operands_that_do_not_fit_are_named():
    def check(draw):
        name, operands, options, _ = dense_case(draw)
        fault = break_operands(draw, operands, options)
        error = RuntimeError if fault == "gradient" else ValueError
        with pytest.raises(error) as caught:
            OPERATORS[name](*operands, **options)
        label = {"piper": "Piper Attention", "sage": "SageAttention2++"}[name]
        assert str(caught.value).startswith(label), (fault, str(caught.value))

    run_cases("attention-faults", 0.25, check, __file__)


def sparse_case(draw):
    blocks, tail = draw.choice([1, 2, 3, 5]), draw.choice([0, 0, 1, 33])
    kv_heads, groups, width = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([64, 128])
    rows = 64 * blocks + tail
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.float32])
    kinds = [draw.choice(VALUES if dtype != torch.float32 else VALUES[:3]) for _ in range(3)]
    heads = (kv_heads * groups, kv_heads, kv_heads)
    operands = [make_rows(draw, (1, count, rows, width), dtype, kind)
                for count, kind in zip(heads, kinds, strict=True)]  # fmt: skip
    counts = {"sparse_key_blocks": draw.randrange(1, blocks + 1)}
    if draw.random() < 0.5:
        counts["sparse_query_blocks"] = draw.randrange(-(-rows // 64) + 1)
    return operands, counts, kinds


def test_sparse_attention():
    """Routed attention stays within the values; with every block kept it is dense attention."""

    def check(draw):
        operands, counts, kinds = sparse_case(draw)
        heads, is_full = operands[0].shape[1], draw.random() < 0.5
        ratios = [1.0 if is_full else draw.choice([0.01, 0.3, 0.5, 1.0]) for _ in range(heads)]
        module = SparsePiperAttention(ratios, routing=draw.choice(["minmax", "mean"]))
        rows = [x.transpose(1, 2).contiguous() for x in operands]
        found = module(*rows, **counts).transpose(1, 2)
        if not is_full:
            kinds = ["routed"] * 3
        assert_attention(found, operands, operands[0].shape[-1] ** -0.5, False, kinds)

    run_cases("sparse-attention", 0.06, check, __file__)


def test_the_draws_are_repeatable():
    first, second = (dense_case(random.Random("x")) for _ in range(2))
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
