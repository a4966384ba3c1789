"""Where NaN and infinities in operands come out on the portable path; never as finite numbers."""

import pytest
import torch
from attention_oracle import random_operands

from piper_kernels import SparsePiperAttention, piper_attention, sage_attention_2pp

ROW, LENGTH = 100, 200
PER_THREAD = [100, 108, 116, 124]  # rows of 32 that share a scale with row 100
PER_WARP = list(range(96, 128))
DENSE = [piper_attention, sage_attention_2pp]
CASES = [(operator, is_causal) for operator in DENSE for is_causal in (False, True)]
bad_numbers = pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])


def operands(which, number):
    """Return ``[2, 2, 200, 64]`` with one bad number in the first head of the first sequence."""
    found = random_operands(2, 2, 2, LENGTH, LENGTH, 64)
    found[which][0, 0, ROW, 3] = number
    return found


def bad_rows(output):
    """Return the rows of the first head with a bad number; other heads must have none."""
    bad = ~output.isfinite().all(-1)
    assert not bad[1].any()
    assert not bad[0, 1].any()
    return bad[0, 0].nonzero().flatten().tolist()


@bad_numbers
@pytest.mark.parametrize(("operator", "is_causal"), CASES)
def test_a_query_spoils_the_rows_that_share_its_scale(operator, is_causal, number):
    output = operator(*operands(0, number), is_causal=is_causal)
    assert bad_rows(output) == PER_THREAD


@bad_numbers
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize(("operator", "is_causal"), CASES)
def test_a_key_or_value_spoils_its_head(operator, is_causal, which, number):
    output = operator(*operands(which, number), is_causal=is_causal)
    assert bad_rows(output) == list(range(LENGTH))


@bad_numbers
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_sparse_attention(which, number):
    rows = [x.transpose(1, 2) for x in operands(which, number)]
    output = SparsePiperAttention([1.0, 1.0])(*rows, sparse_key_blocks=3).transpose(1, 2)
    assert bad_rows(output) == (PER_WARP if which == 0 else list(range(LENGTH)))
