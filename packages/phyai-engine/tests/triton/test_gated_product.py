"""The fused gated product: its tiles and units, its steps in PyTorch, its code, and a GPU."""

import re
import subprocess
from collections import Counter
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton
from triton.backends.compiler import GPUTarget

from phyai.triton import gated_product as launcher
from phyai.triton import gated_product_kernel as kernels

ROWS = (1, 127, 128, 255, 257, 968, 2048, 2049, 6186)
BLOCK_M, BLOCK_H, BLOCK_K = launcher.BLOCK_M, launcher.BLOCK_H, launcher.BLOCK_K
# A kernel's code with PyTorch and Python instead of Gluon.
STAND_INS = {"gl": SimpleNamespace(minimum=min, exp2=torch.exp2)}


def on_host(kernel):
    function = kernel.fn
    return FunctionType(function.__code__, vars(kernels) | STAND_INS, argdefs=function.__defaults__)


def activated(values, kind):
    values = values.float()
    if kind == "silu":
        return functional.silu(values)
    return functional.gelu(values, approximate="tanh")


def expected(x, weight, kind):
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
    return activated(gate, kind) * up


def operands(rows, hidden, depth, device="cpu", scale=1.0):
    generator = torch.Generator(device).manual_seed(rows + hidden)
    shapes = ((rows, depth), (2 * hidden, depth))
    x, weight = (torch.randn(s, generator=generator, device=device) for s in shapes)
    return (x * scale).bfloat16(), (weight * depth**-0.5).bfloat16()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("column_tiles", [1, 3, 7])
def test_every_tile_is_the_work_of_one_unit(rows, column_tiles):
    position = on_host(kernels.unit_position)
    row_tiles = triton.cdiv(rows, BLOCK_M)
    group = launcher.group_size(row_tiles)
    units = row_tiles * column_tiles
    programs = min(units, 132)
    found = [
        position(unit, row_tiles, column_tiles, group)
        for program in range(programs)
        for unit in range(program, units, programs)
    ]
    assert sorted(found) == [
        (row, column) for row in range(row_tiles) for column in range(column_tiles)
    ]
    # The last tile has a row to store, and no tile begins behind the last row.
    assert (row_tiles - 1) * BLOCK_M < rows <= row_tiles * BLOCK_M


@pytest.mark.parametrize("row_tiles", [1, 8, 16, 17, 49, 200])
def test_groups_of_row_tiles(row_tiles):
    group = launcher.group_size(row_tiles)
    assert 1 <= group <= launcher.MOST_GROUPED
    last = row_tiles - (triton.cdiv(row_tiles, group) - 1) * group
    assert 0 < last <= group
    assert last >= group - triton.cdiv(row_tiles, group)
    # Units that follow each other have the columns of one tile.
    position = on_host(kernels.unit_position)
    columns = [position(unit, row_tiles, 5, group)[1] for unit in range(group)]
    assert columns == [0] * group


def test_threads_store_every_output_of_a_tile_once():
    layout = launcher.store_layout()
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    places = Counter([(0, 0)])
    for row, column in bases:
        places = Counter([*places, *((r ^ row, c ^ column) for r, c in places)])
    assert len(places) == BLOCK_M * BLOCK_H
    assert set(places.values()) == {1}
    assert 2 ** len(layout.lane_bases) == 32
    assert 2 ** len(layout.warp_bases) == launcher.NUM_WARPS
    # The first registers of a thread are 16 bytes side by side.
    assert layout.reg_bases[:3] == [[0, 1], [0, 2], [0, 4]]


def tile(source, row, rows, step):
    """Returns what TMA writes: zeros behind the last row."""
    part = source[row : row + rows, step * BLOCK_K : (step + 1) * BLOCK_K].float()
    return functional.pad(part, (0, 0, 0, rows - part.shape[0]))


def emulate(x, weight, kind):
    """Does what every program does, unit after unit, and returns the output."""
    rows, depth = x.shape
    hidden = weight.shape[0] // 2
    row_tiles, column_tiles = triton.cdiv(rows, BLOCK_M), hidden // BLOCK_H
    position, activate = on_host(kernels.unit_position), on_host(kernels.activate)
    group, units, steps = launcher.group_size(row_tiles), row_tiles * column_tiles, depth // BLOCK_K
    out = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16)
    programs = min(units, 5)
    for program in range(programs):
        for unit in range(program, units, programs):
            row_tile, column_tile = position(unit, row_tiles, column_tiles, group)
            total = torch.zeros(BLOCK_M, 2 * BLOCK_H)
            for step in range(steps):
                halves = [
                    tile(weight, part * hidden + column_tile * BLOCK_H, BLOCK_H, step)
                    for part in range(2)
                ]
                total += tile(x, row_tile * BLOCK_M, BLOCK_M, step) @ torch.cat(halves).T
            gate, up = total.view(BLOCK_M, 2, BLOCK_H).permute(0, 2, 1).unbind(2)
            values = (activate(gate, launcher.KINDS[kind]) * up).bfloat16()
            first, last = row_tile * BLOCK_M, min(rows, (row_tile + 1) * BLOCK_M)
            target = out[first:last, column_tile * BLOCK_H : (column_tile + 1) * BLOCK_H]
            assert target.isnan().all()
            target.copy_(values[: last - first])
    return out


@pytest.mark.parametrize("kind", launcher.KINDS)
@pytest.mark.parametrize("rows", [1, 129, 257])
def test_steps_in_pytorch(rows, kind):
    x, weight = operands(rows, 256, 5 * BLOCK_K)
    found, wanted = emulate(x, weight, kind).float(), expected(x, weight, kind)
    assert (found - wanted).norm() / wanted.norm() < 3e-3
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize("kind", launcher.KINDS)
def test_activations_of_any_size(kind):
    activate = on_host(kernels.activate)
    values = torch.tensor([0.0, -0.0, 1e-30, -1.0, 1.0, -20.0, 20.0, -3e4, 3e4, -3e38, 3e38])
    found = activate(values, launcher.KINDS[kind])
    wanted = activated(values, kind)
    assert ((found - wanted).abs() <= 1e-6 + 1e-5 * wanted.abs()).all()
    assert activate(torch.tensor(torch.nan), launcher.KINDS[kind]).isnan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "relu2"}, "activation is 'relu2'; allowed: gelu_tanh, silu"),
        ({"x": torch.zeros(256, 64)}, "x is torch.float32; the kernel takes torch.bfloat16"),
        ({"weight": torch.zeros(256, 64).half()}, "weight is torch.float16"),
        ({"weight": torch.zeros(256, 128).bfloat16()}, r"\(256, 128\); x needs \(2 \* H, 64\)"),
        ({"weight": torch.zeros(128, 64).bfloat16()}, "rows must be a multiple of 256"),
        ({"x": torch.zeros(9, 32).bfloat16(), "weight": torch.zeros(256, 32).bfloat16()}, "of 64"),
        ({"weight": torch.zeros(64, 256).bfloat16().T}, "contiguous rows"),
        ({"weight": torch.zeros(256 * 64 + 1).bfloat16()[1:].view(256, 64)}, "clone it"),
    ],
)
def test_what_the_launcher_refuses(changes, message):
    good = {"x": torch.zeros(256, 64).bfloat16(), "weight": torch.zeros(256, 64).bfloat16()}
    with pytest.raises(ValueError, match=message):
        launcher.gated_product(**{**good, "kind": "silu", **changes})


def test_rows_that_tma_cannot_read_are_copied():
    wide = torch.randn(6, 200).bfloat16()
    assert launcher._readable(wide) is wide
    for view in (wide[:, 1:65], torch.randn(6, 67).bfloat16()[:, :64], wide[:1, :64].expand(6, 64)):
        copied = launcher._readable(view)
        assert copied.is_contiguous()
        assert torch.equal(copied, view)


def test_no_rows_are_no_launch():
    x, weight = torch.zeros(2, 0, 64).bfloat16(), torch.zeros(256, 64).bfloat16()
    assert launcher.gated_product(x, weight, "silu").shape == (2, 0, 128)


def compiled(kind):
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = kernels.gated_product_kernel
    descriptor = f"tensordesc<bf16{[BLOCK_M, BLOCK_K]},{launcher.operand_layout(BLOCK_M)!r}>"
    types = {"x_desc": descriptor, "w_desc": descriptor, "out": "*bf16"}
    constants = {
        "STAGES": launcher.STAGES,
        "KIND": launcher.KINDS[kind],
        "STORE": launcher.store_layout(),
        "COPY_REGISTERS": launcher.COPY_REGISTERS,
    }
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("out", "hidden", "depth")}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": launcher.NUM_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("kind", launcher.KINDS)
def test_code_for_sm_90(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = compiled(kind)
    assert kernel.metadata.shared <= 227 * 1024
    text = kernel.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in text
    assert text.count("cp.async.bulk.tensor.2d") == 3
    # Each thread has 64 outputs and stores 8 at a time.
    assert len(re.findall(r"st\.global\.v4\.b32", text)) == 8
    assert "st.global.b" not in text
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    assert stack == 0
    # Twelve warps: eight multiply, the one that copies counts as four.
    assert registers * 12 * 32 <= 65_536


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", launcher.KINDS)
@pytest.mark.parametrize(
    ("rows", "hidden", "depth"),
    [
        *((rows, 256, 192) for rows in (1, 127, 255, 257, 2049)),
        *((968, 16384, 2048), (6186, 1536, 4096), (300, 128, 64)),
    ],
)
def test_numbers_on_a_gpu(kind, rows, hidden, depth):
    x, weight = operands(rows, hidden, depth, "cuda")
    # What is allocated next is full of NaN.
    torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
    found, wanted = launcher.gated_product(x, weight, kind).float(), expected(x, weight, kind)
    assert (found - wanted).norm() / wanted.norm() < 3e-3
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_views_huge_values_and_captures_on_a_gpu():
    x, weight = operands(513, 384, 256, "cuda", scale=300.0)
    wide = torch.full((513, 256 + 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 16 : 16 + 256] = x
    wanted = expected(x, weight, "silu")
    for view in (wide[:, 16 : 16 + 256], x.view(27, 19, 256), x.T.contiguous().T):
        found = launcher.gated_product(view, weight, "silu").flatten(0, -2).float()
        assert (found - wanted).norm() / wanted.norm() < 3e-3
    assert torch.equal(
        launcher.gated_product(x, weight, "silu"), launcher.gated_product(x, weight, "silu")
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = launcher.gated_product(x, weight, "silu")
    x.mul_(0.5)
    graph.replay()
    assert torch.equal(held, launcher.gated_product(x, weight, "silu"))
