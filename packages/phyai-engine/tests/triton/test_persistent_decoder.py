"""The persistent decoder kernel without a GPU: its code run in PyTorch, and its machine code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parent))

import persistent_operands as operands
import persistent_steps as steps

from phyai.kernels import decoder_persistent
from phyai.triton import persistent_attention, persistent_kernel, persistent_stream
from phyai.triton import persistent_decoder as launcher

BF16_STEP = 1.2e-2


def spoiled(tensor):
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 1 << 20)


@pytest.fixture
def on_host(monkeypatch):
    """Puts PyTorch in the place of the kernels, with as many programs as the caller says."""

    def install(case, programs):
        kernel = steps.HostKernel(case.body.parameters())
        monkeypatch.setattr(launcher, "decoder_kernel", kernel)
        monkeypatch.setattr(launcher, "enter_kernel", {(case.rows,): steps.enter_on_host})
        monkeypatch.setattr(launcher, "processors", lambda device: programs)
        empty = torch.empty
        monkeypatch.setattr(
            torch, "empty", lambda *shape, **options: spoiled(empty(*shape, **options))
        )
        return kernel

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield install
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("groups", "programs"),
    [
        ([(5, 70)], 7),
        ([(64, 1)], 3),
        ([(1, 1100)], 5),  # more chunks than are joined at a time
        ([(9, 0), (1, 130), (3, 64)], 6),
        ([(1, 80), (17, 40)], 2),  # the first has one tile of rows, the second two
    ],
)
def test_layers_in_pytorch(groups, programs, on_host):
    case = operands.Case(operands.SMALL, groups)
    wanted, keys, values = case.one_by_one()
    kernel = on_host(case, programs)
    constants = {}
    for _ in range(2):  # the second time with the constants of the first
        found, update, gate = decoder_persistent.run_persistent(
            case.body, case.x, case.place, case.steps, case.final, constants
        )
        assert update is None
        assert gate is None
        stored = case.forget()
        assert operands.error(found, wanted) < BF16_STEP
        assert operands.error(stored[0], keys) < BF16_STEP
        assert operands.error(stored[1], values) < BF16_STEP
    count = operands.SMALL.layers * persistent_stream.PHASES.value
    assert kernel.phases == [(0, count)] * 2


def test_input_is_left_alone(on_host):
    case = operands.Case(operands.SMALL, [(2, 3)])
    on_host(case, 5)
    before = case.x.clone()
    decoder_persistent.run_persistent(case.body, case.x, case.place, case.steps, case.final, {})
    assert torch.equal(case.x, before)


def test_phases_as_launches_of_their_own(on_host):
    case = operands.Case(operands.SMALL, [(3, 20)])
    kernel = on_host(case, 5)
    layers = decoder_persistent._layers(case.body, case.steps, case.final)

    def run(phases):
        return launcher.run_layers(
            layers, case.x, case.plan, case.cache.keys, case.cache.values,
            rotation=case.place.angles(), first_slot=case.first_slot, phases=phases,
        )  # fmt: skip

    assert torch.equal(run(None), run(range(12)))
    assert kernel.phases[1:] == [(n, n + 1) for n in range(12)]


def test_addresses_are_copied_once():
    case = operands.Case(operands.SMALL, [(2, 3)])
    first = decoder_persistent._addresses(case.body)
    assert decoder_persistent._addresses(case.body) is first
    assert first[1, 3] == case.body.layers[1].mlp.down_proj.weight.data_ptr()
    other = torch.nn.Parameter(case.body.layers[0].o_proj.weight.detach().clone())
    case.body.layers[0].o_proj.weight = other
    assert decoder_persistent._addresses(case.body)[0, 1] == other.data_ptr()


def test_weights_that_it_cannot_read():
    case = operands.Case(operands.SMALL, [(2, 3)])
    weight = case.body.layers[0].o_proj.weight.detach()
    odd = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:].view(weight.shape)
    case.body.layers[0].o_proj.weight = torch.nn.Parameter(odd)
    with pytest.raises(ValueError, match="clone it, or choose another row"):
        decoder_persistent._addresses(case.body)


@pytest.mark.parametrize("first", [(0, 100), (150, 20), (170, 64)])
@pytest.mark.parametrize("second", [(100, 90), (190, 10), (300, 7), (0, 0)])
def test_chunks_that_hold_no_new_key(first, second):
    """A chunk may be copied before the barrier only if none of its slots is written before it."""
    are_old = steps.on_host(persistent_attention.are_old, steps._language(0, 1))
    new = set(range(190, 200))
    slots = [start + n for start, length in (first, second) for n in range(length)]
    for low in range(0, len(slots) + 64, 64):
        high = min(low + 64, len(slots))
        found = are_old(low, high, first[0], second[0] - first[1], first[1], 190, 10)
        chunk = slots[low:high]
        assert found == (bool(chunk) and not new & set(chunk)), (low, high)


def compiled(**constants):
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = persistent_kernel.decoder_kernel
    names = kernel.arg_names
    types = dict.fromkeys(names, "*bf16")
    types |= dict.fromkeys(("constants", "rotation", "squares", "heights", "parts"), "*fp32")
    types |= {"weights": "*i64", "segments": "*i32", "counters": "*i32"}
    numbers = names[names.index("rows") :]
    types |= dict.fromkeys(numbers, "i32") | {"eps": "fp32", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    multiples = [n for n in names if types[n].startswith("*")] + ["layer_stride"]
    source = GluonASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    options = {"num_warps": 4, "launch_cooperative_grid": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("sizes", [operands.SMALL, operands.FULL], ids=["small", "full"])
def test_code(sizes, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = compiled(
        WIDTH=sizes.width, MLP=sizes.mlp, HEADS=sizes.heads, DIM=sizes.head_dim,
        OUT_SPLITS=launcher.splits_of(sizes.heads * sizes.head_dim),
        DOWN_SPLITS=launcher.splits_of(sizes.mlp),
        PRODUCER_REGISTERS=launcher.PRODUCER_REGISTERS,
    )  # fmt: skip
    assert kernel.metadata.launch_cooperative_grid
    assert kernel.metadata.shared <= 227 * 1024
    text = kernel.asm["ptx"]
    # Copies bypass the first-level cache, which other programs' stores do not reach.
    assert set(
        re.findall(r"cp\.async\.(c\w\.shared\.global) \[[^]]+\], \[[^]]+\], (\w+)", text)
    ) == {("cg.shared.global", "0x10")}
    assert text.count("red.release.gpu.global.add.u32") == persistent_stream.PHASES.value
    assert text.count("ld.acquire.gpu.global.b32") == persistent_stream.PHASES.value
    for columns in (32, 64):
        assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16" in text
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    # The warp that streams weights counts as four.
    assert registers * 256 <= 65_536
    assert stack <= 256  # addresses that live through all phases
