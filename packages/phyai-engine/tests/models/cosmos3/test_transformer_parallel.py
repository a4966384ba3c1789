"""Ranks that share one request equal one rank: tensor parallel, branch parallel, and both."""

import os
import signal
import subprocess
import sys
import traceback

import pytest
import torch

from phyai.layers import TensorParallel
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.parallel import Parallel, join
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import ActionLayout, Layout, Modalities

LAYOUT = Layout(2, 3, 4, (0,), 15.0, ActionLayout(3, 0, (0,), 6, 1), sound_frames=2)


def answers(variant, parallel=None, device="cpu"):
    """Returns both branches' velocities and those of the first alone, as one vector each."""
    layout = LAYOUT if variant == "qwen" else Layout(2, 3, 4, (0,), 15.0, LAYOUT.action)
    model = random_transformer(
        Cosmos3Config.tiny(variant), params_dtype=torch.float32, device=device, parallel=parallel
    )
    generator = torch.Generator().manual_seed(0)
    sound = torch.randn(5, 2, generator=generator) if layout.sound_frames else None
    action, video = (torch.randn(shape, generator=generator) for shape in ((3, 8), (4, 2, 3, 4)))
    state = Modalities(video, action, sound).map(lambda part: part.to(device))
    texts = [model.prefill(torch.arange(5, 5 + length)) for length in (6, 3)]
    found = model.velocities(state, 833, texts, layout) + model.velocities(
        state, 833, texts[:1], layout
    )
    return [
        torch.cat([p.flatten() for p in (one.video, one.action, one.sound) if p is not None]).cpu()
        for one in found
    ]


def run_rank(rank, world, store, degrees, backend):
    """Joins a group of ``world`` processes; returns the answers under each of ``degrees``."""
    group, device = torch.distributed, "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    group.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        return [
            answers(variant, join(tp_size=tp, cfg_size=cfg), device)
            for variant in ("qwen", "edge")
            for tp, cfg in degrees
        ]
    finally:
        group.destroy_process_group()


def fork_others(world, store, degrees, backend, folder):
    """Runs every rank but the first in a process of its own; returns their exit statuses.

    Nothing has run in this process but imports, which every rank would need.
    """
    children = []
    for rank in range(1, world):
        child = os.fork()
        if not child:
            status = 1
            try:
                torch.save(run_rank(rank, world, store, degrees, backend), f"{folder}/{rank}.pt")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run_ranks(folder, world, degrees, backend="gloo"):
    """Returns the answers of all ranks, of which the first is this process."""
    store = str(folder / "store")
    code = f"import runpy; me = runpy.run_path({__file__!r}); "
    arguments = world, store, degrees, backend, str(folder)
    code += f"assert not any(me['fork_others'](*{arguments!r}))"
    # One thread, so that forking is safe; a session of their own, so that none is left behind.
    others = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        found = [run_rank(0, world, store, degrees, backend)]
        assert others.wait(timeout=300) == 0
    finally:
        if others.poll() is None:
            os.killpg(others.pid, signal.SIGKILL)
    return found + [torch.load(folder / f"{rank}.pt") for rank in range(1, world)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "degrees"),
    [(2, [(2, 1), (1, 2)]), (4, [(2, 2), (4, 1)])],
    ids=["two_ranks", "four_ranks"],
)
def test_ranks_equal_one_rank(tmp_path, world, degrees):
    expected = [answers(variant) for variant in ("qwen", "edge") for _ in degrees]
    for rank in run_ranks(tmp_path, world, degrees):
        for ours, theirs in zip(rank, expected, strict=True):
            for found, wanted in zip(ours, theirs, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected[0][0], expected[0][1], atol=1e-2)


@pytest.mark.gpu
def test_two_gpus_equal_one(tmp_path):
    if torch.cuda.device_count() < 2 or torch.version.cuda is None:
        pytest.skip("needs two NVIDIA GPUs")
    degrees = [(2, 1), (1, 2)]
    expected = [answers(variant, device="cuda:0") for variant in ("qwen", "edge") for _ in degrees]
    for rank in run_ranks(tmp_path, 2, degrees, "nccl"):
        for ours, theirs in zip(rank, expected, strict=True):
            for found, wanted in zip(ours, theirs, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_one_process_needs_no_group():
    assert join() == Parallel()
    for sizes in ({"tp_size": 2}, {"cfg_size": 2}, {"tp_size": 0}, {"cfg_size": 3}):
        with pytest.raises(ValueError, match=r"1 processes cannot be tp_size"):
            join(**sizes)


def test_impossible_places_are_refused():
    with pytest.raises(ValueError, match="branch 2 of 2; allowed: one branch, or 0 and 1 of 2"):
        Parallel(branch=2, branches=2)
    with pytest.raises(ValueError, match="the vocabulary is 64 and cannot be divided among 3"):
        answers("qwen", Parallel(TensorParallel(0, 3)))
