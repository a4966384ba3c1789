"""G4: every mode end to end against diffusers' whole pipeline, from texts and pictures on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phyai.models.cosmos3.loading import load_transformer
from phyai.models.cosmos3.noise import start
from phyai.models.cosmos3.pipeline import Cosmos3Pipeline
from phyai.models.cosmos3.positions import media_positions
from phyai.models.cosmos3.prompts import PromptStyle
from phyai.models.cosmos3.requests import (
    ForwardDynamicsRequest,
    ImageToVideoRequest,
    InverseDynamicsRequest,
    TextToImageRequest,
    TextToVideoRequest,
    VideoToVideoRequest,
    WorldActionRequest,
)
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.sound import SoundDecoder
from phyai.models.cosmos3.state import Modalities
from phyai.models.cosmos3.text import Cosmos3Tokenizer
from phyai.models.cosmos3.vae import WanVAE
from phyai.models.cosmos3.vae.random_weights import fill

FIXTURES = Path(__file__).parent / "fixtures"
REPOSITORY = FIXTURES / "pipeline"
BAR = 5e-6
"""Of the largest magnitude, after 8 forwards in fp32."""

DEVICE_BAR = 1e-4

SAMPLING = Sampling(4, 3.0, 5.0)
DOMAIN, RAW_DIM, CHUNK = "bridge_orig_lerobot", 10, 4


def pictures(seed, *shape):
    """The pictures of the script that made the fixture."""
    coarse = np.random.default_rng(seed).integers(0, 256, (*shape[:-2], 4, 4, 3), np.uint8)
    rows, columns = (np.arange(size) * 4 // size for size in shape[-2:])
    return coarse[..., rows, :, :][..., columns, :]


CONTROL = {
    "prompt": "pick up the red cup",
    "domain": DOMAIN,
    "fps": 15.0,
    "tier": "256",
    "sampling": SAMPLING,
    "return_latents": True,
}
SHOWN = {
    "prompt": "A red cup.",
    "negative_prompt": "blue",
    "height": 48,
    "width": 64,
    "sampling": SAMPLING,
    "return_latents": True,
}
ACTIONS = np.random.default_rng(7).standard_normal((CHUNK, RAW_DIM)).astype(np.float32)
REQUESTS = {
    "policy": WorldActionRequest(**CONTROL, chunk=CHUNK, image=pictures(1, 96, 144)),
    "policy_large": WorldActionRequest(**CONTROL, chunk=CHUNK, image=pictures(2, 256, 448)),
    "forward_dynamics": ForwardDynamicsRequest(
        **CONTROL, image=pictures(1, 96, 144), actions=ACTIONS
    ),
    "inverse_dynamics": InverseDynamicsRequest(**CONTROL, frames=pictures(3, CHUNK + 1, 64, 48)),
    "text_to_image": TextToImageRequest(**SHOWN),
    "text_to_video": TextToVideoRequest(**SHOWN, frames=9, sound=True),
    "image_to_video": ImageToVideoRequest(**SHOWN, frames=9, image=pictures(4, 60, 100)),
    "video_to_video": VideoToVideoRequest(
        **SHOWN, frames=9, clip=pictures(5, 5, 48, 64), take="first"
    ),
}


@pytest.fixture(scope="module")
def golden():
    return load_file(FIXTURES / "pipeline.safetensors")


class Pipeline(Cosmos3Pipeline):
    """Keeps what the last request started from and ended with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        inner = self._denoise

        def run(model, state, conditions, layout, sampling):
            self.first = state
            self.lengths = [one.length for one in conditions]
            self.last = inner(model, state, conditions, layout, sampling)
            return self.last

        self._denoise = run


def load(device):
    config = json.loads((REPOSITORY / "vae" / "config.json").read_text())
    vae = WanVAE.from_config(config, device=device)
    sizes = {"dec_dim": 4, "dec_c_mults": [1] * 5, "vocoder_input_dim": 5}
    sound = SoundDecoder.from_config(sizes, device=device)
    for parameter in sound.parameters():
        parameter.data.fill_(0.01)
    transformer = load_transformer(REPOSITORY, device=device, params_dtype=torch.float32)
    tokenizer = Cosmos3Tokenizer.from_folder(REPOSITORY / "text_tokenizer")
    return transformer, fill(vae), tokenizer, sound


@pytest.fixture(scope="module")
def parts():
    return load("cpu")


def build(parts, device="cpu", **options):
    return Pipeline(*parts, device=torch.device(device), style=PromptStyle.DIFFUSERS, **options)


def close(found, expected, bar=BAR):
    scale = float(expected.abs().max())
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= bar * scale


def noise_of(case):
    """What the transformer was first called with: clean values are in it."""
    return Modalities(case["video"][0], case.get("action"), case.get("sound"))


@pytest.mark.parametrize("mode", REQUESTS)
def test_mode_of_diffusers(mode, golden, parts):
    case = {k.removeprefix(f"{mode}."): v for k, v in golden.items() if k.startswith(f"{mode}.")}
    request = REQUESTS[mode]
    pipeline = build(parts, system_prompt=mode == "text_to_video")
    plan = pipeline.plan(request)
    if plan.pixels is not None:
        assert list(plan.pixels.shape[-2:]) == case["canvas"].tolist()
        mean = (127.5 * (plan.pixels + 1)).mean((-1, -2))
        torch.testing.assert_close(mean, case["pixels"][0, :, : mean.shape[1]], rtol=0, atol=1e-3)
    for text, ids in ((plan.prompt, "ids"), (plan.negative, "negative_ids")):
        assert list(pipeline.tokenizer.encode(text, system=plan.system)) == case[ids].tolist()
    result = pipeline.run(request, noise=noise_of(case))
    # Clean frames are encoded here, not taken from the fixture.
    close(pipeline.first.video, case["video"][0])
    assert pipeline.lengths == [len(case["ids"]), len(case["negative_ids"])]
    close(result.latents, case["final_video"][0])
    if "final_action" in case:
        close(torch.from_numpy(result.normalized), case["final_action"])
        assert np.array_equal(result.actions, result.normalized)
    if "final_sound" in case:
        close(pipeline.last.sound, case["final_sound"])
        assert result.sound.shape == (2, 1920 * case["sound"].shape[1])


@pytest.mark.parametrize("mode", REQUESTS)
def test_positions_of_diffusers(mode, golden, parts):
    pipeline = build(parts)
    layout = pipeline.plan(REQUESTS[mode]).layout
    expected, ids = golden[f"{mode}.positions"], golden[f"{mode}.ids"]
    found = media_positions(layout, len(ids), pipeline.transformer.config)
    rows = 0 if layout.action is None else layout.action.rows
    video = len(found) - rows - layout.sound_frames
    # diffusers has sound before actions.
    order = [*range(video), *range(video + rows, len(found)), *range(video, video + rows)]
    assert torch.equal(found[order].T, expected[:, len(ids) :])


@pytest.mark.gpu
def test_modes_on_the_device(golden):
    """In fp32; sums have another order there."""
    parts = load("cuda")
    for mode, request in REQUESTS.items():
        case = {
            k.removeprefix(f"{mode}."): v for k, v in golden.items() if k.startswith(f"{mode}.")
        }
        pipeline = build(parts, "cuda", system_prompt=mode == "text_to_video")
        result = pipeline.run(request, noise=noise_of(case))
        close(result.latents.cpu(), case["final_video"][0], DEVICE_BAR)
        if "final_action" in case:
            close(torch.from_numpy(result.normalized), case["final_action"], DEVICE_BAR)


def test_clean_frames_do_not_drift(golden, parts):
    pipeline = build(parts)
    case = {k.removeprefix("policy."): v for k, v in golden.items() if k.startswith("policy.")}
    result = pipeline.run(REQUESTS["policy"], noise=noise_of(case))
    assert torch.equal(result.latents[:, 0], pipeline.first.video[:, 0])


def test_the_bar_tells_mistakes_from_rounding(golden, parts):
    """The weakest mistake in the loop is far above the bar."""
    pipeline = build(parts)
    case = {k.removeprefix("policy."): v for k, v in golden.items() if k.startswith("policy.")}
    plan = pipeline.plan(REQUESTS["policy"])
    state = start(noise_of(case), plan.layout, frames=None, rows=None)
    expected = case["final_video"][0]
    for sampling in (
        Sampling(4, 3.0, 5.05),
        Sampling(4, 3.1, 5.0),
        Sampling(4, 3.0, 5.0, interval=(0.0, 999.0)),
        Sampling(4, 3.0, 5.0, schedule="karras"),
    ):
        found = pipeline._denoise(
            pipeline.transformer, state, pipeline.conditions(plan), plan.layout, sampling
        )
        assert (found.video - expected).abs().max() > 10 * BAR * expected.abs().max()
