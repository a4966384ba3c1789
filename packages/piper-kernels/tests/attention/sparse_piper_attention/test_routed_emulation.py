"""The arithmetic of the routed Hopper kernel, emulated, against the contract."""

import pytest
import routed_emulation
import torch
from routed_cases import EXACT_ERROR, MAX_ERROR, MEAN_ERROR, case, case_of, relative

from piper_kernels.attention.sparse_piper_attention._hopper import HopperBackend


def emulate(c, **options):
    return routed_emulation.attend(c.prepared, c.request, c.routes, c.rows, c.lengths, **options)


@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
@pytest.mark.parametrize(
    "options",
    [
        {"rows": 64, "keep": 1.0},
        {"rows": 65, "keep": 1.0},
        {"rows": 193, "keep": 0.5, "heads": 4, "kv_heads": 2},
        {"rows": 449, "keep": 0.3, "blocks": 5, "routed": 4},
        {"rows": 256, "lengths": [64, 17, 1, 33], "keep": 0.5},
    ],
    ids=str,
)
def test_close_to_the_reference(options, head_dim):
    c = case(**options, head_dim=head_dim)
    found, wanted = c.existing(emulate(c)), c.existing(c.reference())
    error = (found - wanted).abs()
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR
    assert relative(found, c.existing(c.exact())) < EXACT_ERROR


@pytest.mark.parametrize(
    ("amplitude", "value_amplitude"), [(1e-6, 1e-6), (4, 1), (6e4, 1), (1, 6e4)], ids=str
)
def test_any_amplitude_is_as_good_as_the_reference(amplitude, value_amplitude):
    c = case(321, keep=1.0, amplitude=amplitude, value_amplitude=value_amplitude)
    found = c.existing(emulate(c))
    assert found.isfinite().all()
    error = (found - c.existing(c.reference())).abs() / value_amplitude
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR
    exact = c.existing(c.exact())
    assert relative(found, exact) < 1.1 * relative(c.existing(c.reference()), exact) + 0.004


def test_pairs_far_apart_count_for_nothing_or_everything():
    """Coordinates fall and rise by more than 32-bit numbers hold."""
    c = case(640, heads=1, keep=1.0)
    query, key, value = c.operands
    key = key.clone()
    key[:, 128:256] *= 0.01
    key[:, 512:576] = query[:, :1] * 60
    changed = case_of(query, key, value, keep=1.0)
    found, wanted = changed.existing(emulate(changed)), changed.existing(changed.reference())
    assert (found - wanted).abs().max() < MAX_ERROR


def test_equal_scores_of_many_keys_do_not_overflow():
    """Zero queries weigh all keys alike, so every code and every sum is as large as it gets."""
    query, key, value = case(2048, heads=1, keep=1.0).operands
    c = case_of(torch.zeros_like(query), key, value.abs(), keep=1.0)
    error = (c.existing(emulate(c)) - c.existing(c.reference())).abs()
    assert error.max() < 1e-3


def test_constant_values_are_exact():
    query, key, value = case(321, keep=1.0).operands
    value = value.bfloat16().float()[:, :1].expand(value.shape)
    c = case_of(query, key, value, keep=1.0)
    assert torch.equal(c.existing(emulate(c)), value.repeat_interleave(2, dim=2))


def test_a_range_is_a_slice():
    c = case(449, keep=0.5, blocks=6)
    whole = emulate(c)
    assert torch.equal(emulate(c, first_block=2, blocks=3), whole[:, 128:320])


def test_other_devices_are_told_why():
    usable, reason = HopperBackend().support(torch.device("cpu"), 64)
    assert not usable
    assert reason == "Hopper: needs sm_90, got a CPU"
