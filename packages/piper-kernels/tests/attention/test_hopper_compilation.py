"""The attention kernels for Hopper compile without a GPU and hardly spill."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernel_table"))

from kernel_compiler import build, usage_of
from kernel_sm90_cases import sm90_cases

from piper_kernels.attention._preparation.dense import PiperKeyValue
from piper_kernels.attention._sm90_kernels import launch
from piper_kernels.attention.piper_attention._hopper import HopperBackend

DENSE = {case.variant: case for case in sm90_cases() if case.kernel == "dense_attention_kernel"}
ROUTED = {case.variant: case for case in sm90_cases() if case.kernel == "routed_attention_kernel"}
# Bytes of a thread. Where three warpgroups share the registers of a multiprocessor, row numbers and
# scales are stored; of routed attention numbers that are rarely read.
DENSE_STACK, ROUTED_STACK = {2: 128, 3: 256}, 64
NEGATED_MAGIC = "0fCB400000"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def head_dim_of(case):
    return int(case.variant.split()[0].removeprefix("D"))


def test_every_width_is_compiled():
    assert {head_dim_of(case) for case in DENSE.values()} == {64, 128}
    assert set(ROUTED) == {"D64", "D128"}


@pytest.mark.parametrize("variant", DENSE)
def test_dense_attention(variant):
    compiled = build(DENSE[variant], "sm_90")
    assert compiled.metadata.shared < 227 * 1024
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in text
    values = "f32.e4m3.e4m3" if "E4M3" in variant else "s32.s8.s8"
    assert f"wgmma.mma_async.sync.aligned.m64n{head_dim_of(DENSE[variant])}k32.{values}" in text
    # Codes go from accumulators to operands within threads: the only shuffles are of row maxima.
    assert "stmatrix" not in text
    # Starts of exponents are rounded once, or codes may leave their range.
    assert re.search(rf"fma\.rn\.f32 .*{NEGATED_MAGIC}", text)
    assert not re.search(rf"mul\S* .*{NEGATED_MAGIC}", text)
    most = DENSE_STACK[DENSE[variant].constants["GROUPS"]]
    assert usage_of(compiled, "sm_90").spilled <= most


def test_windows_of_dense_attention():
    case = DENSE["D128 causal"]
    case = replace(case, constants=case.constants | {"WINDOW": True})
    most = DENSE_STACK[case.constants["GROUPS"]]
    assert usage_of(build(case, "sm_90"), "sm_90").spilled <= most


def test_every_sequence_of_a_window_can_be_described(monkeypatch):
    """Descriptors must be aligned, but the scales of the second sequence start anywhere."""
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: calls.append((grid, arguments, constants))

    monkeypatch.setattr(launch, "dense_attention_kernel", Kernel())
    lead, tiles, width = (2, 1), 3, 64
    codes = torch.zeros(*lead, 64 * tiles, width, dtype=torch.int8)
    packed = PiperKeyValue(
        key_codes=codes,
        key_scale=torch.zeros(*lead, tiles),
        value_codes=codes.mT.contiguous(),
        value_multiplier=None,
        value_log_max=torch.zeros(*lead, tiles),
        value_sum=torch.zeros(*lead, 2, width, dtype=torch.int32),
        value_mean=torch.zeros(*lead, width),
    )
    out = torch.zeros(2, 100, 1, width).transpose(1, 2)
    query, scale = codes[:, :, :128].contiguous(), torch.zeros(*lead, 4)
    HopperBackend().attend_window(query, scale, packed, 64 * tiles, False, 128, out)
    for index, (grid, arguments, constants) in enumerate(calls):
        descriptors, pointers = arguments[:5], arguments[5:]
        assert grid == (1,)
        assert all(d.base.data_ptr() % 16 == 0 for d in descriptors)
        assert pointers[4].data_ptr() == out[index].data_ptr()
        assert pointers[10:] == (1, 128, width, width)
        assert constants["WINDOW"]
        assert not constants["PER_KEY"]
    assert len(calls) == 2


@pytest.mark.parametrize("variant", ROUTED)
@pytest.mark.parametrize("ragged_and_coarse", [False, True])
def test_routed_attention(variant, ragged_and_coarse):
    flags = dict.fromkeys(("HAS_LENGTHS", "HAS_COARSE"), ragged_and_coarse)
    case = replace(ROUTED[variant], constants=ROUTED[variant].constants | flags)
    compiled = build(case, "sm_90")
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8" in text
    assert f"wgmma.mma_async.sync.aligned.m64n{head_dim_of(case)}k32.s32.s8.s8" in text
    assert "setmaxnreg.inc" in text
    assert "cp.async.bulk.tensor.5d" in text
    # Two programs share a multiprocessor, one kibibyte is reserved for each.
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024
    assert usage_of(compiled, "sm_90").spilled <= ROUTED_STACK


def test_tile_sums():
    case = next(case for case in sm90_cases() if case.kernel == "tile_sum_kernel")
    assert usage_of(build(case, "sm_90"), "sm_90").spilled == 0
