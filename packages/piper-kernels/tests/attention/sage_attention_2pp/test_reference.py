"""SageAttention2++ against FP64 attention and a loop over single numbers."""

import pytest
import torch
from attention_oracle import exact_attention, random_operands, sage_loop, sqnr
from torch._dynamo.testing import CompileCounterWithBackend

from piper_kernels import sage_attention_2pp
from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.attention._backends import AttentionRequest, select_backend
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sage_attention_2pp import _backend, reference

LENGTHS = [1, 2, 9, 63, 64, 65, 127, 129, 193]
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
widths = pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
# Of the output, for N(0, 1). A short sum keeps the errors of 4-bit significands.
MEAN_ERROR, MAX_ERROR = 0.03, 0.2
# Codes may flip at ties between FP32 and FP64.
LOOP_MEAN, LOOP_MAX = 1e-3, 0.02


@causal
@widths
@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_close_to_exact_attention(rows, dtype, head_dim, is_causal, nan_filled_memory):
    operands = random_operands(1, 2, 2, rows, rows, head_dim, dtype, seed=rows)
    output = sage_attention_2pp(*operands, is_causal=is_causal)
    assert output.shape == operands[0].shape
    assert output.dtype == dtype
    assert output.is_contiguous()
    error = (output.double() - exact_attention(*operands, is_causal=is_causal)).abs()
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR


@causal
@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.name)
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 64), (9, 128), (65, 64), (130, 128)])
def test_equal_to_a_loop_over_single_numbers(rows, head_dim, granularity, is_causal):
    operands = random_operands(1, 1, 1, rows, rows, head_dim, seed=rows)
    output = reference.attend(
        reference.prepare(*operands, granularity=granularity),
        scale=head_dim**-0.5,
        is_causal=is_causal,
    )[0, 0]
    wanted = sage_loop(
        *(x[0, 0] for x in operands), is_causal=is_causal, granularity=granularity.name
    )
    error = (output.double() - wanted).abs()
    assert error.mean() < LOOP_MEAN
    assert error.max() < LOOP_MAX


@causal
@widths
@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.name)
def test_quality(head_dim, is_causal, granularity):
    operands = random_operands(1, 2, 2, 1024, 1024, head_dim)
    scale = head_dim**-0.5
    output = reference.attention(*operands, scale, is_causal, granularity=granularity)
    assert sqnr(output, exact_attention(*operands, is_causal=is_causal)) >= 27


@pytest.mark.parametrize(("queries", "keys"), [(1, 127), (9, 65), (193, 1), (97, 143), (2, 8193)])
def test_rectangular_and_strided(queries, keys, nan_filled_memory):
    operands = random_operands(2, 3, 3, 2 * queries, 2 * keys, 64, seed=keys)
    strided = [x[:, :, ::2] for x in operands]
    output = sage_attention_2pp(*strided)
    assert torch.equal(output, sage_attention_2pp(*(x.contiguous() for x in strided)))
    assert sqnr(output, exact_attention(*strided)) > 26


def test_many_keys():
    operands = random_operands(1, 1, 1, 3, 131_073, 64)
    assert sqnr(sage_attention_2pp(*operands), exact_attention(*operands)) > 26


def test_a_key_offset_is_removed():
    query, key, value = random_operands(1, 1, 1, 17, 17, 64)
    shifted = (key.float() + 100).half()
    exact = exact_attention(query, shifted, value)
    assert sqnr(sage_attention_2pp(query, shifted, value), exact) > 26


@causal
@pytest.mark.parametrize("amplitude", [1e-6, 1e-3, 1e3, 6e4])
def test_amplitudes(amplitude, is_causal):
    query, key, value = random_operands(1, 2, 2, 129, 129, 64, torch.bfloat16)
    large = (value * amplitude).clamp(-6e4, 6e4)
    output = sage_attention_2pp(query, key, large, is_causal=is_causal)
    exact = exact_attention(query, key, large, is_causal=is_causal)
    assert sqnr(output, exact) > 26
    large = (query * amplitude).clamp(-6e4, 6e4)
    assert sage_attention_2pp(large, key, value, is_causal=is_causal).isfinite().all()


def test_sums_of_a_tile_stay_within_fp16():
    query, key, value = random_operands(1, 1, 1, 64, 64, 64)
    output = sage_attention_2pp(query, torch.zeros_like(key), torch.full_like(value, 6e4))
    torch.testing.assert_close(output, torch.full_like(output, 6e4), rtol=2e-3, atol=0)


def test_the_sum_of_a_tile_is_rounded_to_fp16_and_sums_of_tiles_are_not():
    query, value = torch.randn(1, 1, 1, 64).half(), torch.ones(1, 1, 64, 64)
    value[:, :, -1] = 2**-9 / 2.25  # the smallest E4M3 code
    codes = 448 * (63 * 2.25 + 2**-9)  # 63504.875, where FP16 has steps of 32
    for tiles in (1, 3):
        repeated = value.repeat(1, 1, tiles, 1)
        operands = reference.prepare(query, torch.zeros_like(repeated), repeated)
        output = reference.attend(operands, scale=0.125)
        wanted = operands.value_scale / (64 * 448)
        torch.testing.assert_close(output[:, :, 0], 63520 * wanted, rtol=2e-5, atol=0)
        assert not torch.isclose(output[:, :, 0], codes * wanted, rtol=2e-5, atol=0).any()


@causal
def test_the_operator_keeps_its_contract(is_causal):
    operands = [x[:, :, ::2] for x in random_operands(1, 2, 2, 130, 130, 64)]
    operator = torch.ops.piper_kernels.sage_attention_2pp.default
    torch.library.opcheck(operator, (*operands, 0.125, is_causal))


def test_one_graph_serves_all_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sage_attention_2pp, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (65, 130, 193):
            operands = random_operands(3, 4, 4, rows, rows, 64, seed=rows)
            permuted = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
            assert torch.equal(compiled(*permuted), sage_attention_2pp(*operands))
    assert counter.frame_count == 1


class Zeros:
    """A backend that answers with zeros on the CPU."""

    name = "zeros"

    def support(self, request, /):
        return request.target is None, "needs a CPU"

    def attention(self, query, key, value, scale, is_causal):
        return torch.zeros_like(query)


def test_a_backend_in_front_is_asked_first(monkeypatch):
    operands = random_operands(1, 1, 1, 9, 9, 64)
    assert sage_attention_2pp(*operands).any()
    monkeypatch.setattr(_backend, "BACKENDS", (Zeros(), *_backend.BACKENDS))
    assert not sage_attention_2pp(*operands).any()
    ampere = AttentionRequest(AcceleratorTarget("cuda", "sm_80"), 64, is_causal=False)
    assert select_backend(_backend.BACKENDS, ampere).name == "portable"
