"""The Hopper products of NVFP4 weights: their schedules, their arithmetic in steps, on a GPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.linear.nvfp4._nvidia.hopper_plan import (
    HELD_ROWS,
    STEP,
    HopperPlan,
    select_plan,
)
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import ceil_div, swap_packed_pairs

hopper = pytest.importorskip("piper_kernels.linear.nvfp4._nvidia.hopper")

from piper_kernels.linear.nvfp4 import _product, _weight  # noqa: E402
from piper_kernels.linear.nvfp4 import triton as backend  # noqa: E402
from piper_kernels.linear.nvfp4._nvidia import hopper_layouts  # noqa: E402

ROWS = (1, 7, 16, 17, 31, 33, 127, 129, 320, 1000)
PLANS = [
    HopperPlan(8, 128, 2, 8, w_stages=6, held_steps=16, turns=2),
    HopperPlan(8, 128, 3, 8, w_stages=6, held_steps=4),
    HopperPlan(16, 128, 2, 8, w_stages=5, held_steps=16, chunk=2),
    HopperPlan(16, 128, 4, 8, w_stages=4, held_steps=4, chunk=2),
    HopperPlan(32, 128, 2, 8, w_stages=4, x_stages=8),
    HopperPlan(128, 128, 1, 8, w_stages=3, x_stages=6),
    HopperPlan(256, 128, 1, 8, w_stages=3, x_stages=4),
]


def arranged(x):
    """Order features as the products of a step meet them."""
    return x.reshape(x.shape[0], -1, 4, 8, 2, 4).permute(0, 1, 5, 3, 2, 4).reshape(x.shape)


def test_every_part_of_a_plan_has_steps():
    shapes = itertools.product(ROWS, (1, 129, 1024, 8192, 28672), (1, 3, 9, 32, 112))
    for rows, outputs, steps in shapes:
        plan = select_plan(rows, outputs, steps * STEP, 132)
        part = ceil_div(steps, plan.splits)
        assert (plan.splits - 1) * part < steps
        assert plan.outputs % 128 == 0
        assert plan.arrangement == (0 if rows <= HELD_ROWS else STEP)
        if plan.held_steps:
            assert plan.rows >= rows
            assert plan.held_steps >= part


def emulate(words, scale, x, rows):
    """Return what the kernel sums of a step, in its steps, with FP64 sums.

    Args:
        words: int16 ``[outputs, 64]``.
        scale: int32 ``[outputs / 8, 32]``, the swizzled bytes as TMA brings them.
        x: Arranged ``[rows, 256]``.
        rows: Rows of ``x``.
    """
    outputs = words.shape[0]
    raw = scale.view(outputs // 128, 4, 4, 8, 4).permute(0, 4, 2, 3, 1).reshape(outputs, 4)
    each = raw.contiguous().view(torch.float8_e4m3fn).view(outputs, 16)
    factors = (each.float() * 2.0**118).bfloat16().repeat_interleave(4, 1)
    total = torch.zeros(outputs, rows, dtype=torch.float64)
    places = ((0, 0x000F, 0x1040), (0, 0x00F0, 0x0104), (8, 0x000F, 0x1040), (8, 0x00F0, 0x0104))
    for p, (shift, mask, copies) in enumerate(places):
        # Two words are decoded at once: what leaves the lower one must not reach the upper one.
        pair = words.view(torch.int32).long() & 0xFFFFFFFF
        both = ((pair >> shift) & mask * 0x10001) * copies & 0x81C081C0
        code = torch.stack((both & 0xFFFF, both >> 16), 2).view(outputs, 64)
        values = code.to(torch.int16).view(torch.bfloat16).double() * factors.double()
        assert torch.equal(values, values.bfloat16().double())
        left = values.view(outputs, 4, 8, 2).permute(0, 2, 1, 3).reshape(outputs, 64)
        total += left @ x[:, 64 * p : 64 * (p + 1)].double().t()
    return total * hopper.OPERAND_FACTOR


def test_steps_of_the_kernel_are_the_product():
    outputs, rows = 256, 5
    generator = torch.Generator().manual_seed(0)
    weight = PiperNVFP4Tensor.from_hp(
        torch.randn(outputs, STEP, generator=generator), is_swizzled_scales=True
    )
    weight.scale.view(torch.uint8).view(-1)[:128] = torch.arange(128).clamp(max=126)
    x = torch.randn(rows, STEP, generator=generator).bfloat16()
    words = weight.qdata.view(torch.int16)
    scale = weight.scale.view(torch.uint8).view(-1).view(torch.int32).view(-1, 32)
    exact = weight.dequantize(torch.float32).double() @ x.double().t()
    actual = emulate(words, scale, arranged(x), rows)
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("outputs", "warps"), [(128, 4), (128, 8), (256, 8), (256, 16)])
def test_lanes_hold_the_scales_of_their_words(outputs, warps):
    """No value leaves its lane between shared memory and the operands of the products."""

    def coordinates(layout, register):
        threads = []
        for thread in range(32 * warps):
            point = [0, 0]
            bases = [
                basis
                for bit, basis in enumerate(layout.lane_bases + layout.warp_bases)
                if thread >> bit & 1
            ] + [basis for bit, basis in enumerate(layout.reg_bases) if register >> bit & 1]
            for basis in bases:
                point = [point[0] ^ basis[0], point[1] ^ basis[1]]
            threads.append(tuple(point))
        return threads

    word_layout = hopper_layouts.word_layout(outputs, warps)
    scale_layout = hopper_layouts.scale_layout(outputs, warps)
    rows = outputs // 16 // warps * 2
    for index in range(rows):
        scales = coordinates(scale_layout, index)
        for word in range(16):
            for (row, column), (high, low) in zip(
                coordinates(word_layout, 16 * index + word), scales, strict=True
            ):
                tile, inside = high // 16, high % 16
                byte_row = (inside % 4 * 32 + low) // 4
                assert row == tile * 128 + byte_row + low % 4 * 32
                assert column // 16 == inside // 4
    seen = set()
    for register in range(16 * rows):
        seen.update(coordinates(word_layout, register))
    assert len(seen) == outputs * 64


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_compiles(plan, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    biased = PLANS.index(plan) % 2 == 1
    kernel = hopper.hopper_stream_kernel if plan.held_steps else hopper.hopper_product_kernel
    names = list(kernel.arg_names)
    constants = hopper.constants_of(
        plan, high_first=biased, levels=(biased, True), bias=biased, follows=plan.rows == 8
    )
    assert list(constants) == names[-len(constants) :]
    options = {"num_warps": plan.num_warps}

    def descriptor(rows, columns, name):
        layout = hopper.operand_layout(rows, columns, int(name.strip("bfi")))
        return f"tensordesc<{name}{[rows, columns]},{layout!r}>"

    types = {
        "x_desc": descriptor(plan.rows, 64, "bf16"),
        "word_desc": descriptor(plan.outputs, 64, "i16"),
        "scale_desc": descriptor(16, 32, "i32"),
        "input_level": "*fp32",
        "weight_level": "*fp32",
        "bias": "*bf16",
        "source": "*bf16",
        "out": "*fp32",  # sums of parts, or the widest result
        "factor": "fp32",
    }
    source = GluonASTSource(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("out", "outputs", "features", "out_row_stride")
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{plan.rows}k16.f32.bf16.bf16" in ptx
    # Decoded weights go straight into the products; only results may change lanes.
    loop = ptx[: ptx.rindex("wgmma.mma_async")]
    assert "shfl" not in loop[loop.index("cvt.rn.f16x2.e4m3x2") :]
    assert ("griddepcontrol.launch_dependents" in ptx) == (plan.splits > 1)
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
class TestOnHopper:
    @pytest.fixture(scope="class")
    def weight(self):
        torch.manual_seed(0)
        dense = torch.randn(300, 9 * STEP, device="cuda", dtype=torch.bfloat16)
        return PiperNVFP4Tensor.from_hp(
            dense, compute_per_tensor_scale=True, is_swizzled_scales=True
        )

    def check(self, actual, expected, dtype=torch.bfloat16):
        assert actual.isfinite().all()
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < torch.finfo(dtype).eps + 4e-6, error

    @pytest.mark.parametrize("rows", ROWS)
    def test_weight_only(self, weight, rows):
        operands = weight.qdata, weight.scale, weight.per_tensor_scale
        exact = weight.dequantize(torch.float32).double()
        orders = ((0, False), (0, True), (64, False), (256, True))
        for index, (group, high_first) in enumerate(orders):
            x = torch.randn(rows, 2, exact.shape[1], device="cuda", dtype=torch.bfloat16)[:, 1]
            bias_dtype = (None, torch.float16, torch.bfloat16, torch.float32)[(index + rows) % 4]
            bias = None
            if bias_dtype is not None:
                bias = torch.randn(300, 3, device="cuda", dtype=bias_dtype)[:, 1]
            qdata = swap_packed_pairs(weight.qdata) if high_first else weight.qdata
            actual = backend.TritonBackend().weight_only_linear(
                x, qdata, *operands[1:], bias, group, True, high_first
            )
            # A rotated input is rounded to bf16.
            dense = rotate_groups(x.float(), group).bfloat16().double() if group else x.double()
            expected = dense @ exact.t()
            if bias is not None:
                expected += bias.double()
            error = (actual.double() - expected).norm() / expected.norm()
            assert error < 2 * torch.finfo(torch.bfloat16).eps, (group, error)

    @pytest.mark.parametrize("plan", PLANS, ids=str)
    def test_plans(self, weight, plan):
        exact = weight.dequantize(torch.float32).double()
        features = exact.shape[1]
        if plan.held_steps:
            plan = replace(plan, splits=max(plan.splits, ceil_div(9, plan.held_steps)))
        part = ceil_div(9, plan.splits)
        plan = replace(plan, splits=ceil_div(9, part))
        bias = torch.randn(300, device="cuda")
        side = _product.Weight(
            weight.qdata, weight.scale, weight.per_tensor_scale, bias, True, False
        )
        for rows in {1, plan.rows - 1, plan.rows, *(() if plan.held_steps else (plan.rows + 1,))}:
            x = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
            operand = arranged(x) if plan.arrangement else x
            wide = torch.full((rows, 317), torch.nan, device="cuda")
            out = wide[:, 8:308]
            _product.multiply(operand, torch.tensor(0.5).cuda(), side, out, plan, 4.0)
            self.check(out, 2 * x.double() @ exact.t() + bias.double(), torch.float32)
            assert wide[:, :8].isnan().all()
            assert wide[:, 308:].isnan().all()

    def test_corner_values(self, weight):
        operands = weight.qdata, weight.scale.clone(), weight.per_tensor_scale
        run = backend.TritonBackend().weight_only_linear
        for rows in (3, 40):
            x = torch.randn(rows, weight.shape[1], device="cuda", dtype=torch.bfloat16)
            x[0] = 0
            x[1, 5] = torch.nan
            bias = torch.randn(300, device="cuda", dtype=torch.bfloat16)
            result = run(x, *operands, bias, 0, True, False)
            assert torch.equal(result[0], bias)
            assert result[1].isnan().all()
            assert result[2:].isfinite().all()
        operands[1].view(torch.uint8).view(-1)[0] = 0x7F  # the NaN of E4M3, of row 0
        for rows in (3, 40):
            x = torch.randn(rows, weight.shape[1], device="cuda", dtype=torch.bfloat16)
            result = run(x, *operands, None, 0, True, False)
            assert result[:, 0].isnan().all()
            assert result[:, 1:].isfinite().all()

    @pytest.mark.parametrize("rows", [0, 1, 16, 40, 1000])
    def test_capture_and_no_rows(self, weight, rows):
        operands = weight.qdata, weight.scale, weight.per_tensor_scale
        x = torch.randn(rows, weight.shape[1], device="cuda", dtype=torch.bfloat16)
        run = backend.TritonBackend().weight_only_linear
        expected = run(x, *operands, None, 0, True, False)
        assert expected.shape == (rows, 300)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(x, *operands, None, 0, True, False)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)

    def test_what_it_is_not_for(self, weight):
        side = _product.Weight(weight.qdata, weight.scale, None, None, True, False)
        assert accelerator_target(side.qdata.device).architecture == "sm_90"
        assert isinstance(_weight.plan_of(side, 5, torch.bfloat16), HopperPlan)
        shifted = torch.empty(weight.qdata.numel() + 2, dtype=torch.uint8, device="cuda")[2:]
        plain = replace(side, swizzled=False)
        moved = replace(side, qdata=shifted.view(weight.qdata.shape))
        narrow = replace(side, qdata=weight.qdata[:, :64].contiguous())
        for other in (plain, moved, narrow):
            assert not isinstance(_weight.plan_of(other, 5, torch.bfloat16), HopperPlan)
        assert not isinstance(_weight.plan_of(side, 5, torch.float16), HopperPlan)
