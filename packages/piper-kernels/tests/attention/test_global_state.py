"""Attention in an autocast region or with another default dtype is that without: FP32 inside."""

from functools import partial

import pytest
import torch
from attention_oracle import random_operands
from process_state import default_dtype

from piper_kernels import (
    SparsePiperAttention,
    coarse_attention,
    mean_pool_block_values,
    piper_attention,
    sage_attention_2pp,
    sparse_piper_coarse_residual,
)

LENGTHS = torch.tensor([64, 3, 64], dtype=torch.int32)


STATES = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default float64": lambda: default_dtype(torch.float64),
}


def packed_rows(count, dtype=torch.float32):
    """Return ``count`` tensors ``[1, 192, 2, 64]``."""
    operands = random_operands(1, 2, 2, 192, 192, 64, torch.float32)
    return [x.transpose(1, 2).contiguous().to(dtype) for x in (*operands, operands[0])[:count]]


def sparse(routing, lengths):
    attention = SparsePiperAttention([0.4, 0.7], routing=routing)

    def run(*operands):
        found = attention(*operands, sparse_key_blocks=2, block_lengths=lengths)
        return found[:, :64]  # rows that exist in either case

    return run, packed_rows(3)


def residual(routing, lengths):
    options = {"routing": routing, "coarse_scale": 0.125, "block_lengths": lengths}
    return partial(sparse_piper_coarse_residual, **options), packed_rows(4)


def coarse():
    scores = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    pooled = mean_pool_block_values(packed_rows(1)[0], LENGTHS)
    return coarse_attention, (scores, pooled)


# Functions and their operands, which are made before anything is set.
CALLS = {
    "piper": (piper_attention, random_operands(1, 2, 1, 70, 130, 64)),
    "piper causal": (
        partial(piper_attention, is_causal=True),
        random_operands(1, 2, 1, 70, 70, 128),
    ),
    "sage": (sage_attention_2pp, random_operands(1, 2, 2, 70, 130, 64)),
    "sparse": sparse("minmax", None),
    "sparse mean": sparse("mean", LENGTHS),
    "residual": residual("minmax", LENGTHS),
    "residual mean": residual("mean", None),
    "coarse": coarse(),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_same(name, state):
    function, operands = CALLS[name]
    expected = function(*operands)
    with STATES[state]():
        found = function(*operands)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("routing", ["minmax", "mean"])
def test_gradients_in_an_autocast_region_are_those_of_fp32(routing):
    gradients = []
    for enabled in (False, True):
        operands = [x.requires_grad_() for x in packed_rows(4)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = sparse_piper_coarse_residual(*operands, routing=routing, coarse_scale=0.125)
        result.sum().backward()
        gradients.append([x.grad for x in operands])
    for plain, autocast in zip(*gradients, strict=True):
        assert torch.equal(plain, autocast)


def test_a_compiled_residual_in_an_autocast_region_is_that_without():
    def function(*operands):
        return sparse_piper_coarse_residual(*operands, routing="mean", coarse_scale=0.125)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for trainable in (False, True):
        operands = [x.requires_grad_(trainable) for x in packed_rows(4)]
        expected = function(*operands)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(compiled(*operands), expected)
