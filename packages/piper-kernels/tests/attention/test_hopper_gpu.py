"""Dense attention on Hopper: the Gluon kernel against its emulation, the contract and itself."""

import hopper_emulation as hopper
import pytest
import torch
from attention_oracle import exact_attention, random_operands, sqnr
from process_state import no_synchronization

from piper_kernels import piper_attention, sage_attention_2pp
from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._hopper import hopper_support
from piper_kernels.attention.piper_attention import _ops, prepared


def _reason():
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    from piper_kernels._triton.targets import accelerator_target

    target = accelerator_target(torch.device("cuda"))
    return hopper_support(AttentionRequest(target, 128, False))[1]


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(_reason()), reason=_reason()),
    pytest.mark.usefixtures("nan_filled_memory"),
]
LENGTHS = [1, 2, 9, 63, 64, 65, 127, 129, 193, 1001]
OPERATORS = {"piper": piper_attention, "sage": sage_attention_2pp}


def on_device(operands, dtype=torch.bfloat16):
    return [x.to(dtype).cuda() for x in operands]


def relative_error(output, exact):
    return ((output.cpu().double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", OPERATORS)
def test_lengths(name, length, head_dim, is_causal):
    operands = random_operands(2, 2, 2, length, length, head_dim, torch.bfloat16)
    output = OPERATORS[name](*on_device(operands), is_causal=is_causal)
    assert output.isfinite().all()
    exact = exact_attention(*operands, is_causal=is_causal)
    assert relative_error(output, exact) < (0.03 if name == "piper" else 0.06)


@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_kernel_computes_what_is_emulated(name, is_causal, head_dim):
    from piper_kernels.attention._sm90_kernels import launch

    operands = random_operands(1, 4, 2 if name == "piper" else 4, 321, 321, head_dim)
    if name == "piper":
        storage = hopper.piper_storage(*operands, is_causal=is_causal)
    else:
        storage = hopper.sage_storage(*operands)
    wanted = hopper.attend(storage, 321, 321, is_causal=is_causal)
    on_gpu = {key: None if x is None else x.cuda() for key, x in storage.items()}
    names = ("multiplier", "log_max", "sums")
    scales = [on_gpu.pop(key, None) for key in names]
    scales = launch.ValueScales(*scales) if name == "piper" else None
    dense = launch.DenseOperands(**on_gpu, scales=scales)
    output = launch.attend(dense, 321, 321, is_causal, torch.float32).cpu()
    # Approximate powers of two move a code at ties only; E4M3 codes have wider steps.
    assert (output - wanted).abs().mean() < (1e-4 if name == "piper" else 5e-4)
    assert (output - wanted).abs().max() < (1e-2 if name == "piper" else 5e-2)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
def test_quality_of_long_sequences(name, head_dim):
    query, key, value = random_operands(1, 1, 1, 8193, 8193, head_dim, torch.bfloat16)
    output = OPERATORS[name](*on_device((query, key, value)))
    exact = exact_attention(query[:, :, -200:], key, value)
    assert sqnr(output[:, :, -200:].cpu(), exact) > (34 if name == "piper" else 27)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", OPERATORS)
def test_very_long_sequences(name, is_causal):
    operands = random_operands(1, 1, 1, 131073, 131073, 64, torch.bfloat16)
    output = OPERATORS[name](*on_device(operands), is_causal=is_causal)
    assert output.isfinite().all()
    query, key, value = operands
    exact = exact_attention(query[:, :, -2:], key, value)
    assert sqnr(output[:, :, -2:].cpu(), exact) > (30 if name == "piper" else 24)


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8, 16])
def test_grouped_queries_equal_repeated_keys(groups):
    query, key, value = on_device(random_operands(2, 2 * groups, 2, 130, 130, 64))
    repeated = [x.repeat_interleave(groups, 1) for x in (key, value)]
    for is_causal in (False, True):
        grouped = piper_attention(query, key, value, is_causal=is_causal)
        assert torch.equal(grouped, piper_attention(query, *repeated, is_causal=is_causal))


@pytest.mark.parametrize("lengths", [(1, 1000), (1000, 1), (65, 193), (129, 64), (200, 8193)])
@pytest.mark.parametrize("name", OPERATORS)
def test_rectangles(name, lengths):
    operands = random_operands(1, 2, 2, *lengths, 128, torch.bfloat16)
    output = OPERATORS[name](*on_device(operands))
    exact = exact_attention(*operands)
    assert relative_error(output, exact) < (0.03 if name == "piper" else 0.06)


@pytest.mark.parametrize("amplitude", [1e-6, 1e-2, 30.0, 6e4])
@pytest.mark.parametrize("name", OPERATORS)
def test_amplitudes(name, amplitude):
    unit = random_operands(1, 2, 2, 193, 193, 64)
    operands = [(x.float() * amplitude).clamp(-6e4, 6e4).to(torch.float16) for x in unit]
    output = OPERATORS[name](*on_device(operands, torch.float16))
    assert output.isfinite().all()
    wanted = OPERATORS[name](*operands)
    size = operands[2].float().abs().mean()
    # The scales of the portable operator are finer, so near-ties of huge scores differ.
    assert (output.cpu().float() - wanted.float()).abs().mean() / size < 0.05


def test_slices_of_a_fused_projection():
    qkv = torch.randn(2, 129, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    views = [qkv[:, :, part].transpose(1, 2) for part in range(3)]
    dense = [x.contiguous() for x in views]
    for operator in OPERATORS.values():
        assert torch.equal(operator(*views), operator(*dense))


def test_constant_values_are_exact():
    query, key, value = on_device(random_operands(1, 2, 1, 129, 1100, 64))
    value = value[:, :, :1].expand(value.shape)
    assert torch.equal(piper_attention(query, key, value), value[:, :, :1].expand(query.shape))


@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
def test_causal_rows_do_not_depend_on_later_values(head_dim):
    query, key, value = on_device(random_operands(1, 2, 2, 300, 300, head_dim))
    changed = value.clone()
    changed[:, :, 150:] = 1000
    first = piper_attention(query, key, value, is_causal=True)
    second = piper_attention(query, key, changed, is_causal=True)
    assert torch.equal(first[:, :, :150], second[:, :, :150])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_prepared_operands(is_causal):
    operands = random_operands(1, 4, 2, 193, 193, 128, torch.bfloat16)
    p = prepared.prepare(*on_device(operands), scale=128**-0.5, is_causal=is_causal, padded=True)
    output = _ops.piper_attention_from_quantized_query(
        p.query_codes, p.query_scale, *on_device(operands)[1:], 193, is_causal
    )
    exact = exact_attention(*operands, is_causal=is_causal)
    assert relative_error(output, exact) < 0.03


def test_one_kernel_for_all_lengths():
    from piper_kernels.attention._sm90_kernels.dense import dense_attention_kernel

    def compiled():
        caches = dense_attention_kernel.device_caches.values()
        return sum(len(cache[0]) for cache in caches)

    counts = []
    for length in (64, 65, 127, 1000, 1024, 1):
        piper_attention(*on_device(random_operands(1, 2, 1, length, length, 64)))
        counts.append(compiled())
    assert len(set(counts)) == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_capture_and_no_synchronization(name):
    operator = OPERATORS[name]
    first = on_device(random_operands(1, 2, 2, 193, 193, 64))
    second = on_device(random_operands(1, 2, 2, 193, 193, 64, seed=1))
    wanted = operator(*second)
    with no_synchronization():
        operator(*first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(*first)
    for destination, source in zip(first, second, strict=True):
        destination.copy_(source)
    graph.replay()
    assert torch.equal(captured, wanted)
