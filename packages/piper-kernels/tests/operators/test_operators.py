"""What every operator must do: opcheck, no synchronization, capture, no writes outside."""

import pytest
import torch
from operator_samples import GROUP, operator_names, samples
from process_state import no_synchronization
from torch.nn import functional

from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
CPU_SAMPLES = samples("cpu")
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# Storing a computed second scale level refuses non-finite weights, which reads one number back.
READS_BACK = {"nvfp4_quantize_two_level"}


def on(device, index):
    return (CPU_SAMPLES if device == "cpu" else samples(device))[index]


def fresh(sample):
    """Return the arguments with tensors of their own, strides kept."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a)
        if isinstance(a, torch.Tensor)
        else a
        for a in sample.arguments
    )


def results(sample, arguments):
    """Return what a call returns and what it changes."""
    returned = sample.overload(*arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    changed = [
        argument
        for argument, described in zip(arguments, sample.overload._schema.arguments, strict=False)
        if described.alias_info is not None
        and described.alias_info.is_write
        and argument is not None
    ]
    return [*(value for value in returned if value is not None), *changed]


def test_every_operator_has_a_sample():
    different = {sample.operator for sample in CPU_SAMPLES} ^ set(operator_names())
    assert not different, f"give each operator a Sample in operator_samples.py: {different}"
    assert len({str(sample) for sample in CPU_SAMPLES}) == len(CPU_SAMPLES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(CPU_SAMPLES)), ids=[str(s) for s in CPU_SAMPLES])
def test_opcheck(index, device):
    sample = on(device, index)
    arguments = fresh(sample)
    checks = list(OPCHECKS)
    if any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments):
        checks.remove("test_schema")  # compares arguments with allclose, which FP8 has not
    with torch.no_grad():
        torch.library.opcheck(sample.overload, arguments, test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(CPU_SAMPLES)), ids=[str(s) for s in CPU_SAMPLES])
def test_the_schema_says_what_is_written_and_results_share_nothing(index, device):
    sample = on(device, index)
    arguments = fresh(sample)
    changed = results(sample, arguments)
    kept = [a for a in arguments if isinstance(a, torch.Tensor)]
    written = {id(value) for value in changed}
    for before, after in zip(sample.arguments, arguments, strict=True):
        if isinstance(after, torch.Tensor) and id(after) not in written:
            assert torch.equal(_bits(before), _bits(after))
    storages = [value.untyped_storage().data_ptr() for value in changed if value.numel()]
    storages += [a.untyped_storage().data_ptr() for a in kept if id(a) not in written and a.numel()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("index", range(len(CPU_SAMPLES)), ids=[str(s) for s in CPU_SAMPLES])
def test_results_do_not_depend_on_the_call(index):
    sample = CPU_SAMPLES[index]
    first, second = (results(sample, fresh(sample)) for _ in range(2))
    assert first
    for left, right in zip(first, second, strict=True):
        assert torch.equal(_bits(left), _bits(right))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("index", range(len(CPU_SAMPLES)), ids=[str(s) for s in CPU_SAMPLES])
def test_no_operator_synchronizes_and_a_replay_equals_eager(index):
    sample = on("cuda", index)
    if sample.operator in READS_BACK:
        pytest.skip("reads one number back, as its documentation says")
    eager = results(sample, fresh(sample))  # compiles what has to be compiled
    arguments = fresh(sample)
    with no_synchronization():
        again = results(sample, arguments)
    for left, right in zip(eager, again, strict=True):
        assert torch.equal(_bits(left), _bits(right))
    arguments = fresh(sample)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(sample, arguments)
    for value, argument in zip(sample.arguments, arguments, strict=True):
        if isinstance(value, torch.Tensor):
            argument.copy_(value)
    graph.replay()
    for left, right in zip(eager, captured, strict=True):
        assert torch.equal(_bits(left), _bits(right))


def _bits(value):
    return value.contiguous().view(torch.uint8) if value.numel() and value.ndim else value


def public_calls(device):
    """Return the public functions with operands, by name."""
    torch.manual_seed(2)
    dense = torch.randn(48, 64, dtype=torch.bfloat16, device=device)
    x = torch.randn(2, 9, 64, dtype=torch.bfloat16, device=device)
    wide = torch.randn(9, 128, dtype=torch.bfloat16, device=device)
    bias = torch.randn(48, dtype=torch.bfloat16, device=device)
    int8 = ConvRotInt8Tensor.from_hp(dense, group_size=GROUP)
    static = ConvRotInt8Tensor.from_hp(
        dense, group_size=GROUP, act_per_tensor_scale=torch.tensor(0.05, device=device)
    )
    options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
    nvfp4 = PiperNVFP4Tensor.from_hp(dense, **options)
    rotated = ConvRotNVFP4Tensor.from_hp(dense, group_size=GROUP, **options)
    return {
        "int8": lambda: functional.linear(x, int8, bias),
        "int8 static": lambda: functional.linear(x, static, bias),
        "int8 gelu": lambda: convrot_int8_linear(x, int8, bias, activation_fn="gelu_tanh"),
        "int8 swiglu": lambda: convrot_int8_linear(wide, int8, bias, activation_fn="swiglu"),
        "int8 empty": lambda: functional.linear(x[:, :0], int8, bias),
        "int8 one row": lambda: functional.linear(x[0, 0], int8, bias),
        "nvfp4": lambda: functional.linear(x, nvfp4, bias),
        "convrot nvfp4": lambda: functional.linear(x, rotated, bias),
        "convrot nvfp4 one row": lambda: functional.linear(x[0, 0], rotated, bias),
    }


PUBLIC = list(public_calls("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_neither_synchronize_nor_resist_capture(name):
    run = public_calls("cuda")[name]
    with torch.inference_mode():
        eager = run()
        with no_synchronization():
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        captured.fill_(torch.nan)
        graph.replay()
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_return_their_shape(name):
    result = public_calls("cpu")[name]()
    assert result.shape[-1] == 48
    assert result.dtype == torch.bfloat16
    assert torch.isfinite(result).all()
