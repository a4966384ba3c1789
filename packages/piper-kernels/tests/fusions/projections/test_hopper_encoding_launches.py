"""The product on Hopper whose tiles leave encoded: compiled code, and what is launched when."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from projection_operands import operands

pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernel_table"))

from kernel_compiler import build, usage_of
from kernel_projection_cases import projection_cases

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.convrot_int8_sage_qk import _hopper, _launch

CASES = {c.variant: c for c in projection_cases() if c.kernel == "hopper_encode_kernel"}
MINMAX = RoutingMode.MINMAX
WARP, THREAD = Granularity.PER_WARP, Granularity.PER_THREAD
# Of a multiprocessor, and what the driver keeps of every program.
SHARED, RESERVED = 228 << 10, 1 << 10


@pytest.mark.parametrize("variant", CASES)
def test_two_programs_fit_and_blocks_stay_in_registers(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = build(CASES[variant], "sm_90")
    assert 2 * (compiled.metadata.shared + RESERVED) <= SHARED
    usage = usage_of(compiled, "sm_90")
    assert usage.registers == 128
    assert usage.spilled <= 64, usage
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in text
    assert "setmaxnreg.inc.sync.aligned.u32 \t232" in text
    # Two exchanges of each of 128 numbers of a thread rotate; others reduce.
    assert text.count("shfl.sync") <= 256 + 160


class Launches:
    """Records launches instead of starting them."""

    def __init__(self):
        self.found = []

    def __call__(self, programs, arguments, options, key):
        names = _hopper._encode.kernel.arg_names
        assert len(arguments) == len(names)
        assert options["num_warps"] == 4
        self.found.append(dict(zip(names, arguments, strict=True)) | {"programs": programs})


@pytest.fixture
def launches():
    recorder, target = Launches(), AcceleratorTarget("cuda", "sm_90")
    recorder.kernel = _hopper._encode.kernel
    with (
        patch.object(_hopper, "_encode", recorder),
        patch.object(_hopper, "sm_count", return_value=132),
        patch.object(_launch, "accelerator_target", return_value=target),
    ):
        yield recorder.found


def encoders(case, granularity=WARP, rotary_mode=MINMAX):
    sequence = _launch._sequence(case.inputs, case.projection, case.lengths)
    mean = torch.zeros(sequence.batch, sequence.heads, sequence.head_dim)
    return (
        _launch.QueryEncoder(sequence, case.transform, 0.1, rotary_mode, granularity),
        _launch.KeyEncoder(sequence, case.transform, rotary_mode, granularity),
        _launch.ValueEncoder(sequence, mean, True, True),
    )


def test_sequences_of_whole_tiles_are_one_launch(launches):
    case = operands(256, features=128, rotary=128, batch=3)
    query, key, value = encoders(case)
    for encoder in (query, key, value):
        _launch._project(case.inputs, case.projection, encoder)
    assert [found["KIND"] for found in launches] == [0, 1, 2]
    assert [found["batches"] for found in launches] == [3] * 3
    assert [found["programs"] for found in launches] == [3 * 2 * 2] * 3
    assert launches[0]["codes"].data_ptr() == query.codes.data_ptr()
    assert launches[0]["codes"].dtype == torch.int16
    assert launches[0]["first_summary"] is query.summary
    assert launches[1]["keys"] is key.keys
    assert launches[1]["partials"] is key.partials
    assert launches[1]["second_summary"] is key.auxiliary
    assert launches[2]["codes"] is value.codes
    assert launches[2]["scales"] is value.multiplier
    assert launches[2]["first_summary"] is value.block_means
    assert launches[2]["mean"] is value.mean


@pytest.mark.parametrize(("rows", "delay"), [(132 * 128, 0), (4 * 132 * 128, 1500)])
def test_programs_of_long_loops_start_apart(launches, rows, delay):
    case = operands(rows, features=320, heads=1, rotary=32)
    _launch._project(case.inputs, case.projection, encoders(case)[0])
    assert launches[0]["programs"] == min(rows // 128, 264)
    assert launches[0]["delay"] == delay


def test_other_sequences_are_launched_apart(launches):
    case = operands(130, rotary=96, batch=2)
    for encoder in encoders(case):
        launches.clear()
        _launch._project(case.inputs, case.projection, encoder)
        assert [found["batches"] for found in launches] == [1, 1]
        first, second = launches
        for name in ("x_scale", "codes", "keys", "partials", "first_summary", "mean"):
            assert second[name].data_ptr() >= first[name].data_ptr()
            assert second[name].shape[0] == 1
        assert second["x_scale"].data_ptr() == first["x_scale"].data_ptr() + 4 * 130
        assert second["x_desc"].base.data_ptr() == first["x_desc"].base.data_ptr() + 130 * 64


@pytest.mark.parametrize(
    ("sizes", "granularity"), [({"rotary": 38}, WARP), ({"rotary": 64}, THREAD)]
)
def test_forms_without_a_kernel_are_left_to_windows(launches, sizes, granularity):
    case = operands(64, **sizes)
    query, key, value = encoders(case, granularity)
    assert not _hopper.supports(query)
    assert _hopper.supports(key) == (granularity is THREAD)
    assert _hopper.supports(value)
    centered = _launch.ValueEncoder(query.sequence, value.mean, False, False)
    assert not _hopper.supports(centered)
    assert not launches


def test_a_range_of_rows_of_several_sequences_is_left_to_windows(launches):
    case = operands(256, batch=2)
    inputs = _launch.PreparedInput(case.inputs.qdata[:, 64:192], case.inputs.scale[:, 64:192])
    sequence = _launch._sequence(inputs, case.projection, None)
    mean = torch.zeros(sequence.batch, sequence.heads, sequence.head_dim)
    value = _launch.ValueEncoder(sequence, mean, True, False)
    for qdata in (inputs.qdata, inputs.qdata.contiguous()):
        part = _launch.PreparedInput(qdata, inputs.scale)
        assert not _launch._encode_in_product(part, case.projection, value)
    assert not launches
