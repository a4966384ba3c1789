"""Cosmos3's engine on a GPU answers as on the CPU, and so do two GPUs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args
from phyai.models.cosmos3.requests import (
    ForwardDynamicsRequest,
    ImageToVideoRequest,
    InverseDynamicsRequest,
    TextToVideoRequest,
    VideoToVideoRequest,
)
from phyai.models.cosmos3.sampler import Sampling
from phyai.processing import Observation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
TWO = Sampling(2, 3.0, 5.0)
CONTRACT = PolicyContract(chunk=4, tier="256", sampling=TWO)


def build(folder, device, dtype=torch.float32, parallel=None):
    arguments = Cosmos3Args(folder, decoder=True, contract=CONTRACT)
    config = EngineConfig(DeviceConfig(device, dtype), parallel=parallel or ParallelConfig())
    return Engine(EngineArgs("cosmos3_policy", arguments, config))


def picture(seed, height=64, width=96):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def observe(seed):
    names = ("wrist", "exterior_1", "exterior_2")
    images = {name: picture(seed + index, 90, 160) for index, name in enumerate(names)}
    return Observation(images, np.linspace(-1, 1, 8, dtype=np.float32), "put the cup away")


def requests(sound):
    clip = np.stack([picture(index) for index in range(5)])
    size = {"prompt": "a cup", "height": 64, "width": 96, "frames": 9, "sampling": TWO}
    action = {"prompt": "push", "domain": "pusht", "sampling": TWO, "return_latents": True}
    yield TextToVideoRequest(**size, sound=sound, return_latents=True)
    yield ImageToVideoRequest(**size, image=clip[0], return_latents=True)
    yield VideoToVideoRequest(**size, clip=clip, return_latents=True)
    yield ForwardDynamicsRequest(**action, image=clip[0], actions=np.ones((4, 2)))
    yield InverseDynamicsRequest(**action, frames=clip)


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 products in fp32, so that the GPU can be held to the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("variant", ["nano", "edge"])
def test_every_mode_agrees_with_the_cpu(variant, tiny_nano, tiny_edge):
    folder = tiny_nano if variant == "nano" else tiny_edge
    gpu, cpu = build(folder, "cuda"), build(folder, "cpu")
    for request in requests(sound=variant == "nano"):
        ours, theirs = gpu.run(request), cpu.run(request)
        scale = theirs.latents.abs().max()
        assert (ours.latents.cpu() - theirs.latents).abs().max() < 1e-3 * scale, type(request)
        if getattr(theirs, "sound", None) is not None:
            # Random weights saturate: a few samples of many differ by up to 0.016.
            apart = np.abs(ours.sound - theirs.sound)
            assert apart.mean() < 1e-3
            assert apart.max() < 0.05
        if theirs.frames is not None:
            apart = np.abs(ours.frames.astype(int) - theirs.frames)
            assert apart.mean() < 0.1


def test_recorded_and_eager_policies_agree_in_bf16(tiny_nano):
    exact = build(tiny_nano, "cpu")
    engine = build(tiny_nano, "cuda", torch.bfloat16)
    for seed in range(3):
        # The first request records, later ones replay with other pictures.
        rough = engine.infer(observe(seed), seed=seed).normalized
        right = exact.infer(observe(seed), seed=seed).normalized
        cosine = (rough * right).sum() / np.linalg.norm(rough) / np.linalg.norm(right)
        assert cosine > 0.999
    again = engine.infer(observe(0), seed=0, video=True)
    assert again.video is not None
    assert again.video.std() > 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", [ParallelConfig(cfg=2), ParallelConfig(tp=2)], ids=str)
def test_two_gpus_answer_as_one_does(tiny_nano, parallel):
    alone, together = build(tiny_nano, "cuda"), build(tiny_nano, "cuda", parallel=parallel)
    try:
        request = replace(next(iter(requests(sound=True))), seed=3)
        ours, theirs = together.run(request), alone.run(request)
        scale = theirs.latents.abs().max().item()
        assert (ours.latents - theirs.latents.cpu()).abs().max() < 1e-3 * scale
        actions = [engine.infer(observe(1), seed=1).actions for engine in (together, alone)]
        np.testing.assert_allclose(*actions, atol=1e-2)
    finally:
        together.close()
