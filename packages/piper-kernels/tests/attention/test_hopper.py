"""The arithmetic of the Hopper kernel, emulated, against the contract of the operators."""

import hopper_emulation as hopper
import pytest
import torch
from attention_oracle import exact_attention, random_operands, sqnr

from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._hopper import hopper_support
from piper_kernels.attention.piper_attention import prepared
from piper_kernels.attention.piper_attention import reference as piper
from piper_kernels.attention.sage_attention_2pp import reference as sage

MEAN_ERROR, MAX_ERROR = 0.003, 0.12
# Queries, keys, query heads, key heads, head width, causal.
SHAPES = [
    (1, 1, 2, 1, 64, False),
    (65, 193, 3, 1, 64, False),
    (129, 63, 2, 2, 128, False),
    (127, 127, 7, 7, 64, True),
    (257, 257, 4, 2, 128, True),
]


def emulated(operator, operands, *, scale=None, is_causal=False, per_key=None):
    query, key, value = operands
    lengths = query.shape[2], key.shape[2]
    if operator is piper:
        storage = hopper.piper_storage(
            query, key, value, scale=scale, is_causal=is_causal, per_key=per_key
        )
    else:
        storage = hopper.sage_storage(query, key, value, scale=scale)
    return hopper.attend(storage, *lengths, is_causal=is_causal)


def reference(operator, operands, scale, is_causal=False):
    """Return the contract in FP32, with the scales of the kernel."""
    if operator is sage:
        quantized = sage.prepare(*operands, granularity=hopper.Granularity.PER_WARP)
        return sage.attend(quantized, scale=scale, is_causal=is_causal)
    lengths = {"query_length": operands[0].shape[2], "key_length": operands[1].shape[2]}
    granularity = hopper.Granularity.PER_WARP
    quantized = prepared.prepare(
        *operands, scale=scale, is_causal=is_causal, granularity=granularity
    )
    return prepared.attend(quantized, **lengths, is_causal=is_causal)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operator", [piper, sage], ids=["piper", "sage"])
def test_close_to_the_reference(operator, shape):
    queries, keys, heads, kv_heads, head_dim, is_causal = shape
    kv_heads = kv_heads if operator is piper else heads
    operands = random_operands(2, heads, kv_heads, queries, keys, head_dim)
    wanted = reference(operator, operands, head_dim**-0.5, is_causal)
    error = (emulated(operator, operands, is_causal=is_causal) - wanted).abs()
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR


def test_values_with_a_scale_per_key():
    operands = random_operands(1, 2, 1, 65, 193, 64)
    wanted = reference(piper, operands, 0.125)
    error = (emulated(piper, operands, per_key=True) - wanted).abs()
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR


@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
@pytest.mark.parametrize(("operator", "gate"), [(piper, 34), (sage, 27)], ids=["piper", "sage"])
def test_quality_on_normal_data(operator, gate, head_dim):
    operands = random_operands(1, 2, 2, 512, 1024, head_dim)
    exact = exact_attention(*operands)
    assert sqnr(emulated(operator, operands), exact) > gate


# At 1e-6 the epsilon of the value scales costs two bits.
@pytest.mark.parametrize(
    ("amplitude", "tolerance"), [(1e-6, 0.02), (1e-2, 0.007), (30.0, 0.012), (6e4, 0.007)]
)
@pytest.mark.parametrize("operator", [piper, sage], ids=["piper", "sage"])
def test_any_amplitude_is_finite_and_close_to_the_reference(operator, amplitude, tolerance):
    unit = random_operands(1, 2, 2, 70, 200, 64)
    query, key, value = (
        x.float().mul(amplitude).clamp(-6.5e4, 6.5e4).to(torch.float16) for x in unit
    )
    wanted = reference(operator, (query, key, value), 0.125)
    output = emulated(operator, (query, key, value))
    assert output.isfinite().all()
    size = value.float().abs().mean()
    # A row that sees one key has the rounding of one value code, relative to its tile.
    assert (output - wanted).abs().mean() / size < tolerance


def test_exponents_far_apart_between_pairs():
    """Keys of later pairs count for nothing, or for everything, without overflow."""
    query, key, value = random_operands(1, 1, 1, 64, 640, 64)
    key = key.clone()
    key[:, :, 128:256] *= 0.01
    key[:, :, 512:] = query[:, :, :1] * 60
    wanted = exact_attention(query, key, value)
    output = emulated(piper, (query, key, value))
    assert output.isfinite().all()
    assert sqnr(output, wanted) > 20


def test_constant_values_are_exact():
    query, key, value = random_operands(1, 2, 1, 129, 1100, 64)
    value = value[:, :, :1].expand(value.shape)
    output = emulated(piper, (query, key, value))
    assert torch.equal(output, value[:, :, :1].float().expand(output.shape))


def test_causal_rows_do_not_depend_on_later_values():
    query, key, value = random_operands(1, 1, 1, 300, 300, 64)
    changed = value.clone()
    changed[:, :, 150:] = 1000
    first = emulated(piper, (query, key, value), is_causal=True)
    second = emulated(piper, (query, key, changed), is_causal=True)
    assert torch.equal(first[:, :, :150], second[:, :, :150])


def test_what_other_devices_are_told():
    usable, reason = hopper_support(AttentionRequest(None, 64, False))
    assert not usable
    assert reason == "needs sm_90, got a CPU"
