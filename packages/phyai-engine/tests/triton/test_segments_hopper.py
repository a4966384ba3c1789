"""Attention to segments for Hopper: blocks and sums in PyTorch, machine code, and a GPU."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parent))

from phyai.dispatch import KernelQuery, Selector, policy_from_mapping
from phyai.dispatch.catalog import build_catalog
from phyai.kernels.attention_segments import attention_segments
from phyai.runtime.segments import SegmentPlan, segment_row
from phyai.triton import segments_hopper as hopper
from phyai.triton import segments_hopper_kernel as kernels

BLOCK, DIM = hopper.BLOCK_N, hopper.DIM
HOST = SimpleNamespace(where=lambda condition, yes, no: yes if condition else no, constexpr=int)
block_of = FunctionType(
    kernels.block_of.fn.__code__, {**kernels.block_of.fn.__globals__, "gl": HOST}
)
RUNS = [
    ((3, 968), (0, 0)),
    ((5, 1), (0, 0)),
    ((0, 64), (70, 65)),
    ((0, 0), (9, 130)),
    ((2, 127), (400, 1)),
]


def blocks_of(first, second):
    """Returns the slots of every block that a program goes through."""
    (start, length), (later, more) = first, second
    first_blocks = triton.cdiv(length, BLOCK)
    found = []
    for index in range(first_blocks + triton.cdiv(more, BLOCK)):
        begin, left = block_of(index, first_blocks, start, length, later, more, BLOCK)
        found.append((begin, min(left, BLOCK)))
    return found


@pytest.mark.parametrize(("first", "second"), RUNS)
def test_blocks_are_the_slots_that_are_seen(first, second):
    seen = [
        slot for begin, count in blocks_of(first, second) for slot in range(begin, begin + count)
    ]
    assert seen == [
        slot for begin, count in (first, second) for slot in range(begin, begin + count)
    ]
    assert all(count > 0 for _, count in blocks_of(first, second))


def steps(query, keys, values, first, second, factor):
    """What the two warpgroups compute for rows [rows, DIM], in PyTorch."""
    halves = []
    for group in range(2):
        top = torch.full((query.shape[0],), -torch.inf)
        weight, total = torch.zeros_like(top), torch.zeros(query.shape)
        for begin, count in blocks_of(first, second)[group::2]:
            scores = query.float() @ keys[begin : begin + count].float().T
            higher = torch.maximum(top, scores.amax(1) * factor)
            share = torch.exp2(scores * factor - higher[:, None])
            fade = torch.exp2(top - higher)
            weight = weight * fade + share.sum(1)
            product = share.bfloat16().float() @ values[begin : begin + count].float()
            total, top = total * fade[:, None] + product, higher
        halves.append((total, top, weight))
    (mine, top, weight), (theirs, other_top, other_weight) = halves
    higher = torch.maximum(top, other_top)
    left, right = torch.exp2(top - higher), torch.exp2(other_top - higher)
    whole = weight * left + other_weight * right
    return mine * (left / whole)[:, None] + theirs * (right / whole)[:, None]


def case(table, heads, slots, device="cpu"):
    """Returns operands whose unseen slots hold not-a-numbers, and a plan for the table."""
    generator = torch.Generator().manual_seed(len(table) + slots)
    tokens = max(row + count for (row, count), *_ in table)
    query = torch.randn(tokens, heads, DIM, generator=generator).bfloat16()
    keys, values = (torch.full((slots, 1, 1, DIM), torch.nan).bfloat16() for _ in range(2))
    for _, *runs in table:
        for start, count in runs:
            for pages in (keys, values):
                drawn = torch.randn(count, 1, 1, DIM, generator=generator)
                pages[start : start + count] = drawn.bfloat16()
    rows = torch.tensor([segment_row(*entry) for entry in table], dtype=torch.int32)
    most_keys = max(sum(count for _, count in runs) for _, *runs in table)
    plan = SegmentPlan(rows.to(device), max(count for (_, count), *_ in table), most_keys)
    return [tensor.to(device) for tensor in (query, keys, values)], plan


@pytest.mark.parametrize(("first", "second"), RUNS)
def test_steps(first, second):
    (query, keys, values), plan = case([((0, 9), first, second)], 2, 1000)
    scale = DIM**-0.5
    expected = attention_segments(query, keys, values, plan, scale=scale)
    flat = [tensor.view(-1, DIM) for tensor in (query, keys, values)]
    found = steps(*flat, first, second, scale * 1.4426950408889634)
    error = (found - expected.float().view(-1, DIM)).norm() / expected.float().norm()
    assert error < 5e-3


def test_threads_store_every_output_of_a_tile_once():
    layout = hopper.STORE
    places = Counter([(0, 0)])
    for row, column in [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]:
        places.update([(r ^ row, c ^ column) for r, c in places.elements()])
    assert len(places) == hopper.BLOCK_M * DIM
    assert set(places.values()) == {1}
    # The first registers of a thread are 16 bytes side by side.
    assert layout.reg_bases[:3] == [[0, 1], [0, 2], [0, 4]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(3, 2, 128).bfloat16()}, r"shape \(3, 2, 128\)"),
        ({"query": torch.zeros(3, 2, DIM).half()}, "takes torch.bfloat16 heads of 256"),
        ({"key_pages": torch.zeros(4, 1, 2, DIM).bfloat16()}, r"key pages .*\(4, 1, 2, 256\)"),
        (
            {"value_pages": torch.zeros(4, 1, 1, 2 * DIM).bfloat16()[..., ::2]},
            r"value pages .*strides \(512, 512, 512, 2\)",
        ),
        ({"scale": 0.0}, "a positive scale"),
        ({"scale": float("nan")}, "a positive scale"),
    ],
)
def test_what_is_refused(changes, message):
    pages = torch.zeros(4, 1, 1, DIM).bfloat16()
    plan = SegmentPlan(torch.zeros(1, 6, dtype=torch.int32), 3, 4)
    good = {"query": torch.zeros(3, 2, DIM).bfloat16(), "key_pages": pages, "value_pages": pages}
    with pytest.raises(ValueError, match=message):
        hopper.attend_hopper(**{**good, "plan": plan, "scale": 1.0, **changes})


def test_machine_code(tmp_path):
    """The ring and the barriers fit, nothing in the loop is spilled, tiles are stored wide."""
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = kernels.attend_hopper_kernel
    constants = {
        "HEADS": 8, "SLOTS": hopper.SLOTS, "CLEAR": hopper.CLEAR, "JOIN": hopper.JOIN,
        "STORE": hopper.STORE, "ATTEND_REGISTERS": hopper.ATTEND_REGISTERS,
        "COPY_REGISTERS": hopper.COPY_REGISTERS,
    }  # fmt: skip
    descriptor = f"tensordesc<bf16{[BLOCK, DIM]},{hopper.TILE!r}>"
    types = dict.fromkeys(("q_desc", "k_desc", "v_desc"), descriptor)
    types |= {"segments": "*i32", "out": "*bf16", "factor": "fp32"}
    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index("out"),): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 227 * 1024
    text = compiled.asm["ptx"]
    for width, count in ((64, 32), (256, 8)):  # two warpgroups: DIM / 16 and BLOCK / 16 steps
        assert text.count(f"sync.aligned.m64n{width}k16.f32.bf16.bf16") == count
    assert set(re.findall(r"st\.global\.([\w.]+)", text)) == {"v4.b32"}
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 64


PREFERENCE = {
    "rules": [
        {
            "id": "prefix",
            "match": {"op": "attention_segments", "role": "prefix"},
            "prefer": ["triton.attention_segments.hopper", "triton.attention_segments"],
        }
    ]
}
SIZES = {"tokens": 968, "heads": 8, "kv_heads": 1, "head_dim": 256}


def chosen(policy=None, device="nvidia:sm90", dtype="bf16", **changes):
    catalog = build_catalog()
    rules = {"policy": policy_from_mapping(policy, catalog=catalog)} if policy else {}
    query = KernelQuery.build(
        "attention_segments", role="prefix", device=device,
        dtype={"input": dtype, "output": dtype}, shape=SIZES | changes,
    )  # fmt: skip
    return Selector(catalog, device=device, **rules).explain(query).selected


def test_a_policy_chooses_the_row_where_it_can_run(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    assert chosen() == "triton.attention_segments"
    assert chosen(PREFERENCE) == "triton.attention_segments.hopper"
    for changes in (
        {"tokens": 255}, {"kv_heads": 2}, {"head_dim": 128}, {"dtype": "fp16"},
        {"device": "nvidia:sm100"}, {"device": "nvidia:sm80"},
    ):  # fmt: skip
        assert chosen(PREFERENCE, **changes) == "triton.attention_segments", changes


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("table", "heads"),
    [
        ([((0, 968), (0, 968), (0, 0))], 8),
        ([((0, 300), (3, 1), (0, 0))], 8),
        ([((0, 261), (0, 64), (70, 65))], 3),
        ([((1, 257), (0, 0), (9, 130))], 8),
        (
            [
                ((2, 300), (2, 127), (200, 1)),
                ((302, 31), (300, 301), (0, 0)),
                ((340, 7), (900, 3), (0, 0)),
            ],
            8,
        ),
    ],
)
def test_a_gpu_agrees_with_the_reference(table, heads):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    (query, keys, values), plan = case(table, heads, 1100, "cuda")
    for scale in (DIM**-0.5, 4.0):  # small and very unequal weights
        expected = attention_segments(query, keys, values, plan, scale=scale).float()
        for _ in range(3):  # a race would differ from run to run
            found = hopper.attend_hopper(query, keys, values, plan, scale=scale).float()
            for (row, count), *_ in table:
                part, wanted = found[row : row + count], expected[row : row + count]
                assert (part - wanted).norm() / wanted.norm() < 1e-2, (row, scale)
