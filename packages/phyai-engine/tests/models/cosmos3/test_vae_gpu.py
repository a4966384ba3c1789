"""The VAE and the sound decoder on a GPU: numbers, CUDA graphs and no waiting for the host."""

import pytest
import torch

from phyai.models.cosmos3.hashed import hashed
from phyai.models.cosmos3.vae import TileConfig, WanVAE, WanVAEConfig
from phyai.models.cosmos3.vae.random_weights import fill, tiny_config
from phyai.runtime.graphs import CapturedLoop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAYOUTS = ("volume", "stacked")
STEPS = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def error(found, expected):
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def expected():
    vae = fill(WanVAE(tiny_config()))
    clip, latents = hashed("clip", (3, 9, 48, 80)), 2 * hashed("latents", (6, 3, 5, 7))
    vae.tiling = None
    outputs = {"encode": vae.encode(clip), "decode": vae.decode(latents)}
    vae.tiling = TileConfig(3, 2)
    return clip, latents, outputs | {"tiles": vae.decode(latents)}


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_computes_what_a_cpu_computes(expected, layout, dtype):
    clip, latents, outputs = expected
    vae = fill(WanVAE(tiny_config(), dtype=dtype, layout=layout, device="cuda"))
    assert error(vae.encode(clip.cuda()), outputs["encode"]) < STEPS[dtype]
    frame = vae.encode_frame(clip[:, 0].cuda())
    assert error(frame, outputs["encode"][:, 0]) < STEPS[dtype]
    assert error(vae.decode(latents.cuda()), outputs["decode"]) < STEPS[dtype]
    vae.tiling = TileConfig(3, 2)
    assert error(vae.decode(latents.cuda()), outputs["tiles"]) < STEPS[dtype]


def test_the_host_never_waits(expected):
    clip, latents, _ = expected
    vae = fill(WanVAE(tiny_config(), dtype=torch.bfloat16, device="cuda"))
    clip, latents = clip.cuda(), latents.cuda()

    def run():
        vae.encode(clip)
        vae.encode_frame(clip[:, 0])
        list(vae.decode_stream(latents))

    run()  # algorithms are measured and kernels compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_encodes_frame_after_frame():
    vae = fill(WanVAE(tiny_config(), dtype=torch.bfloat16, device="cuda"))
    frames = [hashed(name, (3, 48, 80), "cuda") for name in ("one", "two", "three")]
    captured = CapturedLoop(vae.encode_frame, [frames[0]])
    for frame in frames:
        assert error(captured(frame), vae.encode_frame(frame).cpu()) < 0.01


@torch.inference_mode()
def test_the_published_size_in_bf16_follows_fp32():
    frame = hashed("frame", (3, 544, 640), "cuda")
    latents = 2 * hashed("latents", (48, 2, 16, 20), "cuda")
    found = {}
    for dtype in STEPS:
        vae = fill(WanVAE(WanVAEConfig(), dtype=dtype, device="cuda"))
        found[dtype] = vae.encode_frame(frame).cpu(), vae.decode(latents).cpu()
        del vae
    exact, half = (found[dtype] for dtype in STEPS)
    assert error(half[0], exact[0]) < STEPS[torch.bfloat16]
    assert error(half[1], exact[1]) < STEPS[torch.bfloat16]
