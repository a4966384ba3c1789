"""The bf16 products for Hopper without a GPU: tiles and units, steps in PyTorch, machine code."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parent))

import hopper_steps as steps

from phyai.triton import gated_product as gated
from phyai.triton import gated_product_kernel as gated_kernels
from phyai.triton import hopper_gemm as gemm
from phyai.triton import hopper_gemm_kernel as gemm_kernels
from phyai.triton import hopper_operands as operands

BLOCK_M, BLOCK_K = operands.BLOCK_M, operands.BLOCK_K
PROCESSORS = 132


@pytest.mark.parametrize("rows", [1, 127, 128, 255, 257, 968, 2048, 2049, 6186])
@pytest.mark.parametrize("column_tiles", [1, 3, 7])
def test_every_tile_is_the_work_of_one_unit(rows, column_tiles):
    row_tiles = triton.cdiv(rows, BLOCK_M)
    group = operands.group_size(row_tiles)
    found = [
        steps.tile_position(unit, row_tiles, column_tiles, group)
        for unit in steps.units_of(row_tiles * column_tiles, PROCESSORS)
    ]
    assert sorted(found) == [(r, c) for r in range(row_tiles) for c in range(column_tiles)]
    # The last tile has a row to store, and no tile begins behind the last row.
    assert (row_tiles - 1) * BLOCK_M < rows <= row_tiles * BLOCK_M


@pytest.mark.parametrize("row_tiles", [1, 8, 16, 17, 49, 200])
def test_groups_of_row_tiles(row_tiles):
    group = operands.group_size(row_tiles)
    groups = triton.cdiv(row_tiles, group)
    assert 1 <= group <= operands.MOST_GROUPED
    assert group - groups <= row_tiles - (groups - 1) * group <= group
    # Units that follow each other have the columns of one tile.
    columns = [steps.tile_position(unit, row_tiles, 5, group)[1] for unit in range(group)]
    assert columns == [0] * group


@pytest.mark.parametrize(("count", "splits"), [(1, 1), (5, 2), (18, 3), (68, 3), (68, 4), (7, 7)])
def test_parts_share_the_steps(count, splits):
    found = [steps.unit_position(unit, 2, 3, 2, count, splits) for unit in range(6 * splits)]
    tiles = {(row, column) for row, column, *_ in found}
    assert len(tiles) == 6
    for place in tiles:
        spans = [(part, first, last) for *at, part, first, last in found if tuple(at) == place]
        assert [part for part, _, _ in spans] == list(range(splits))
        assert [s for _, first, last in spans for s in range(first, last)] == list(range(count))
        assert all(first < last for _, first, last in spans)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_threads_store_every_output_of_a_tile_once(columns):
    layout = operands.store_layout(columns)
    places = Counter([(0, 0)])
    for row, column in [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]:
        places.update([(r ^ row, c ^ column) for r, c in places.elements()])
    assert len(places) == BLOCK_M * columns
    assert set(places.values()) == {1}
    assert 2 ** len(layout.lane_bases) == 32
    assert 2 ** len(layout.warp_bases) == operands.NUM_WARPS
    # The first registers of a thread are 16 bytes side by side.
    assert layout.reg_bases[:3] == [[0, 1], [0, 2], [0, 4]]


@pytest.mark.parametrize("kind", gated.KINDS)
@pytest.mark.parametrize("rows", [1, 129, 257])
def test_steps_of_the_gated_product(rows, kind):
    x, weight = steps.operands(rows, 512, 5 * BLOCK_K)
    found = steps.gated_steps(x, weight, kind)
    steps.assert_near(found, steps.gated_reference(x, weight, kind))


@pytest.mark.parametrize("plan", [gemm.Plan(64), gemm.Plan(128, 3), gemm.Plan(256, 4)])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 16, 256), (257, 144, 328)])
def test_steps_of_the_plain_product(rows, columns, depth, plan):
    x, weight = steps.operands(rows, columns, depth)
    bias = torch.randn(columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = steps.gemm_steps(x, weight, bias, plan)
    steps.assert_near(found, x.float() @ weight.float().T + bias.float())


@pytest.mark.parametrize("kind", gated.KINDS)
def test_activations_of_any_size(kind):
    values = torch.tensor([0.0, -0.0, 1e-30, -1.0, 1.0, -20.0, 20.0, -3e4, 3e4, -3e38, 3e38])
    found = steps.activate(values, gated.KINDS[kind])
    wanted = steps.activated(values, kind)
    assert ((found - wanted).abs() <= 1e-6 + 1e-5 * wanted.abs()).all()
    assert steps.activate(torch.tensor(torch.nan), gated.KINDS[kind]).isnan()


@pytest.mark.parametrize(
    "shape", [(768, 1152, 1152), (768, 1152, 4304), (256, 16, 8), (300, 8192, 64)]
)
def test_plans(shape):
    plan = gemm.select_plan(*shape, PROCESSORS)
    rows, columns, depth = shape
    assert plan.splits <= triton.cdiv(depth, BLOCK_K)
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(columns, plan.block_n)
    if plan.splits > 1:
        assert tiles < PROCESSORS
    times = [gemm.estimate(gemm.Plan(n), *shape, PROCESSORS) for n in gemm.BLOCKS_N]
    assert gemm.estimate(plan, *shape, PROCESSORS) <= min(times)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "relu2"}, "activation is 'relu2'; allowed: gelu_tanh, silu"),
        ({"x": torch.zeros(256, 64)}, "x is torch.float32; the kernel takes torch.bfloat16"),
        ({"weight": torch.zeros(256, 64).half()}, "weight is torch.float16"),
        ({"weight": torch.zeros(256, 128).bfloat16()}, r"\(256, 128\); x needs \(N, 64\)"),
        ({"weight": torch.zeros(128, 64).bfloat16()}, "rows must be a multiple of 256"),
        ({"x": torch.zeros(9, 32).bfloat16(), "weight": torch.zeros(256, 32).bfloat16()}, "of 64"),
        ({"weight": torch.zeros(64, 256).bfloat16().T}, "contiguous rows"),
        ({"weight": torch.zeros(256 * 64 + 1).bfloat16()[1:].view(256, 64)}, "clone it"),
    ],
)
def test_what_the_gated_product_refuses(changes, message):
    good = {"x": torch.zeros(256, 64).bfloat16(), "weight": torch.zeros(256, 64).bfloat16()}
    with pytest.raises(ValueError, match=message):
        gated.gated_product(**{**good, "kind": "silu", **changes})


@pytest.mark.parametrize(
    ("columns", "depth", "bias", "message"),
    [
        (24, 64, None, "weight has 24 rows; the kernel takes multiples of 16"),
        (32, 12, None, "TMA needs contiguous rows at multiples of 16 bytes"),
        (32, 64, (31,), r"bias has shape \(31,\); the weight needs \(32,\)"),
    ],
)
def test_what_the_plain_product_refuses(columns, depth, bias, message):
    x, weight = torch.zeros(3, depth).bfloat16(), torch.zeros(columns, depth).bfloat16()
    with pytest.raises(ValueError, match=message):
        gemm.hopper_gemm(x, weight, None if bias is None else torch.zeros(bias))


def test_rows_that_tma_cannot_read_are_copied():
    wide = torch.randn(6, 200).bfloat16()
    assert operands.readable(wide) is wide
    for view in (wide[:, 1:65], torch.randn(6, 67).bfloat16()[:, :64], wide[:1, :64].expand(6, 64)):
        copied = operands.readable(view)
        assert copied.is_contiguous()
        assert torch.equal(copied, view)


def test_no_rows_are_no_launch():
    x, weight = torch.zeros(2, 0, 64).bfloat16(), torch.zeros(256, 64).bfloat16()
    assert gated.gated_product(x, weight, "silu").shape == (2, 0, 128)
    assert gemm.hopper_gemm(x, weight, None).shape == (2, 0, 256)


def compiled(kernel, block, constants, out="*bf16"):
    from triton.experimental.gluon._runtime import GluonASTSource

    def descriptor(rows):
        return f"tensordesc<bf16{[rows, BLOCK_K]},{operands.operand_layout(rows)!r}>"

    types = {"x_desc": descriptor(BLOCK_M), "w_desc": descriptor(block), "out": out}
    types["bias"] = "*bf16"
    constants = {"COPY_REGISTERS": operands.COPY_REGISTERS, **constants}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    multiples = {"out", "bias", "hidden", "columns", "depth"} - set(constants)
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in multiples & set(names)}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": operands.NUM_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check_code(kernel, tmp_path, columns, copies, stores):
    """Checks shared memory, registers, the width of matrix instructions, copies and stores."""
    assert kernel.metadata.shared <= 227 * 1024
    text = kernel.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16" in text
    assert text.count("cp.async.bulk.tensor.2d") == copies
    found = re.findall(r"st\.global\.(?:cg\.)?([\w.]+)", text)
    assert found == [stores[0]] * stores[1]
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    assert stack == 0
    # Twelve warps: eight multiply, the one that copies counts as four.
    assert registers * 12 * 32 <= 65_536


@pytest.mark.parametrize("kind", gated.KINDS)
def test_code_of_the_gated_product(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    store = operands.store_layout(gated.BLOCK_H)
    constants = {"STAGES": gated.STAGES, "KIND": gated.KINDS[kind], "STORE": store}
    kernel = compiled(gated_kernels.gated_product_kernel, gated.BLOCK_H, constants)
    # Each thread has 64 outputs and stores 8 at a time.
    check_code(kernel, tmp_path, 2 * gated.BLOCK_H, copies=3, stores=("v4.b32", 8))


@pytest.mark.parametrize("block_n", gemm.BLOCKS_N)
def test_code_of_the_plain_product(block_n, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = {"STAGES": gemm.BLOCKS_N[block_n], "STORE": operands.store_layout(block_n)}
    whole = constants | {"WHOLE": True, "HAS_BIAS": True}
    kernel = compiled(gemm_kernels.hopper_gemm_kernel, block_n, whole)
    check_code(kernel, tmp_path, block_n, copies=2, stores=("v4.b32", block_n // 16))
    parts = constants | {"WHOLE": False, "HAS_BIAS": False, "bias": None}
    kernel = compiled(gemm_kernels.hopper_gemm_kernel, block_n, parts, out="*fp32")
    check_code(kernel, tmp_path, block_n, copies=2, stores=("v2.b32", block_n // 4))
