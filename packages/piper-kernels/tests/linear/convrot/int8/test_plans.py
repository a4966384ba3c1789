import subprocess
import sys

import pytest
import torch
from aligned_memory import aligned

from piper_kernels._triton.row_chunks import MAX_FUSED_WIDTH
from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.convrot.int8 import _backend, _selection
from piper_kernels.linear.convrot.int8._amd import plan as amd
from piper_kernels.linear.convrot.int8._nvidia import hopper_plan
from piper_kernels.linear.convrot.int8._nvidia import plan as nvidia
from piper_kernels.linear.convrot.int8._plan import plan_input_rows
from piper_kernels.linear.convrot.int8._portable import PortableBackend


@pytest.mark.parametrize(
    ("backend", "architecture", "usable"),
    [("cuda", f"sm_{number}", True) for number in (80, 86, 89, 90, 100, 120, 121)]
    + [("cuda", "sm_70", False), ("cuda", "sm_75", False)]
    + [("hip", name, True) for name in ("gfx942", "gfx1100", "gfx1151", "gfx1200", "gfx1201")]
    + [("hip", "gfx906", False)],
)
def test_supported_targets(backend, architecture, usable):
    supported, reason = _selection.supports_matmul(AcceleratorTarget(backend, architecture))
    assert supported is usable
    assert usable == (reason == "")
    assert usable or architecture in reason
    assert usable or "torch._int_mm" in reason


@pytest.mark.parametrize(
    ("capability", "rows", "columns", "plan"),
    [
        ((8, 0), 16, 8192, nvidia.SM8X_SMALL),
        ((8, 9), 32, 3072, nvidia.SM8X_SMALL),
        ((8, 9), 32, 3136, nvidia.SM8X_MEDIUM),
        ((8, 0), 4096, 128, nvidia.SM8X_NARROW),
        ((8, 0), 1024, 1024, nvidia.SM8X_LARGE),
        ((8, 0), 256, 1024, nvidia.SM8X_MEDIUM),
        ((8, 6), 8192, 8192, nvidia.SM8X_LARGE),
        ((9, 0), 32, 8192, nvidia.SMALL),
        ((12, 0), 64, 4096, nvidia.SMALL),
        ((12, 0), 96, 4096, nvidia.MEDIUM),
        ((12, 0), 8192, 64, nvidia.MEDIUM),
        ((12, 0), 8192, 8192, nvidia.BASE),
        ((10, 0), 8192, 8192, nvidia.SM100_LARGE),
        ((10, 0), 32, 8192, nvidia.SMALL),
    ],
)
def test_nvidia_policy(capability, rows, columns, plan):
    assert nvidia.select_plan(capability, rows, columns) == plan
    target = AcceleratorTarget("cuda", "sm_{}{}".format(*capability))
    assert _selection.select_matmul_plan(target, rows, columns) == plan


@pytest.mark.parametrize(("rows", "plan"), [(1, amd.SMALL), (8192, amd.LARGE)])
def test_amd_policy(rows, plan):
    target = AcceleratorTarget("hip", "gfx1201")
    assert _selection.select_matmul_plan(target, rows, 8192) == plan
    assert _selection.max_fused_width(target) == 16_384
    assert _selection.max_fused_width(AcceleratorTarget("cuda", "sm_90")) is None


@pytest.mark.parametrize(
    ("width", "rows", "num_warps"),
    [
        (64, 16, 1),
        (1024, 1, 1),
        (2048, 1, 2),
        (4096, 1, 4),
        (8192, 1, 4),
        (16_384, 1, 8),
        (5376, 1, 2),
        (49_152, 1, 16),
    ],
)
def test_preparation_of_rows(width, rows, num_warps):
    plan = plan_input_rows(width)
    assert (plan.rows, plan.num_warps) == (rows, num_warps)


def test_every_thread_prepares_whole_loads():
    for width in range(16, MAX_FUSED_WIDTH + 1, 16):
        plan = plan_input_rows(width)
        assert plan.num_warps in (1, 2, 4, 8, 16)
        # Eight values of each quarter of a chunk, and at most 96 of a row.
        assert plan.rows * plan.size >= 1024 * plan.num_warps
        assert plan.rows * plan.size * plan.count <= 96 * 32 * plan.num_warps
    assert plan_input_rows(MAX_FUSED_WIDTH + 16) is None


def test_hopper_plans_leave_no_part_of_k_empty():
    for rows in (1, 16, 50, 64, 65, 128, 500, 968, 8192, 80_000):
        for columns in (1, 33, 2560, 8192, 28_672):
            for depth in (16, 64, 320, 1040, 2048, 5376, 16_384):
                plan = hopper_plan.select_plan(rows, columns, depth, 132)
                steps = -(-depth // plan.block_k)
                share = -(-steps // plan.split_k)
                assert (plan.split_k - 1) * share < steps
                assert plan.split_k == 1 or plan.programs_per_sm == 1


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((8192, 8192, 8192), hopper_plan.LARGE),
        ((8192, 16_384, 2048), hopper_plan.PAIR),
        ((1024, 2048, 16_384), hopper_plan.SQUARE),
        ((16, 8192, 8192), hopper_plan.THIN),
        ((50, 16_384, 2048), hopper_plan.NARROW),
    ],
)
def test_hopper_policy(shape, plan):
    assert hopper_plan.select_plan(*shape, 132) == plan


def test_hopper_splits_k_where_tiles_do_not_fill_the_device():
    plan = hopper_plan.select_plan(16, 2048, 16_384, 132)
    tiles = -(-2048 // plan.block_n)
    assert tiles < 132 // 2
    assert tiles * plan.split_k > 132 // 2


def test_hopper_kernel_needs_its_target_and_triton(monkeypatch):
    qdata = torch.zeros(4, 64, dtype=torch.int8)
    projection = (qdata, torch.ones(4, 1), None)

    def uses(architecture):
        target = AcceleratorTarget("cuda", architecture)
        return _selection.uses_hopper(target, qdata, projection, None)

    assert not uses("sm_89")
    assert not uses("sm_100")
    assert not _selection.uses_hopper(None, qdata, projection, None)
    monkeypatch.setattr(_selection, "hopper_is_installed", lambda: False)
    assert not uses("sm_90")


def test_hopper_kernel_needs_aligned_operands():
    hopper = pytest.importorskip("piper_kernels.linear.convrot.int8._nvidia.hopper")
    codes, shifted = (aligned(64, 64, dtype=torch.int8, offset=offset) for offset in (0, 8))
    scale = torch.ones(64, 1)
    assert hopper.is_usable(codes, (codes, scale, None), (codes, scale, None))
    assert not hopper.is_usable(shifted, (codes, scale, None), None)
    assert not hopper.is_usable(codes, (shifted, scale, None), None)
    assert not hopper.is_usable(codes, (codes, scale, None), (shifted, scale, None))
    repeated = codes[:1].expand(64, 64)
    assert not hopper.is_usable(repeated, (codes, scale, None), None)
    assert not hopper.is_usable(codes[:, :24].as_strided((2, 24), (24, 1)),
                                (codes, scale, None), None)  # fmt: skip


def test_backends_follow_the_target(monkeypatch):
    pytest.importorskip("triton")
    from piper_kernels.linear.convrot.int8._triton_backend import (
        PreparationBackend,
        TritonBackend,
    )

    device = torch.device("cuda", 0)
    kinds = {"sm_70": PreparationBackend, "sm_75": PreparationBackend, "sm_90": TritonBackend}
    for architecture, kind in kinds.items():
        _backend._triton_backend.cache_clear()
        target = AcceleratorTarget("cuda", architecture)
        monkeypatch.setattr(_backend, "accelerator_target", lambda _device, t=target: t)
        monkeypatch.setattr(_backend, "supports_device", lambda _device: True)
        assert type(_backend.select_linear_backend(device)) is kind
    _backend._triton_backend.cache_clear()
    monkeypatch.setattr(_backend, "supports_device", lambda _device: False)
    assert type(_backend.select_linear_backend(device)) is PortableBackend


def test_selection_imports_no_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from piper_kernels.linear.convrot.int8 import _backend, _selection\n"
        "assert type(_backend.select_linear_backend(torch.device('cpu'))).__name__ "
        "== 'PortableBackend'\n"
        "assert not _selection.hopper_is_installed()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
