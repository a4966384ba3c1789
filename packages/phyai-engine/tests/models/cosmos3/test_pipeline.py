"""The pipeline itself: its modes, what it times and refuses, and bf16 against fp32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from phyai.models.cosmos3.denoise import denoise
from phyai.models.cosmos3.droid import ActionSpace
from phyai.models.cosmos3.loading import load_transformer
from phyai.models.cosmos3.noise import native_noise, start
from phyai.models.cosmos3.requests import (
    ForwardDynamicsRequest,
    ImageToVideoRequest,
    InverseDynamicsRequest,
    TextToImageRequest,
    TextToVideoRequest,
    VideoToVideoRequest,
    WorldActionRequest,
)
from phyai.models.cosmos3.results import ImageResult, PolicyResult, VideoResult
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Layout
from phyai.models.cosmos3.stopwatch import Stopwatch
from phyai.models.cosmos3.vae import load_vae
from phyai.processing.errors import ProcessingError

from .pipelines import CONTRACT, FAST, build, observation, pictures


class TestModes:
    """Every mode answers; numbers are held to diffusers' elsewhere."""

    def test_policy(self, parts):
        pipeline = build(parts)
        result = pipeline.run(observation(seed=5, decode_video=True, return_latents=True))
        assert isinstance(result, PolicyResult)
        assert result.actions.shape == result.normalized.shape == (4, 8)
        np.testing.assert_allclose(result.actions[:, 7], 1 - result.normalized[:, 7], rtol=1e-6)
        assert np.isfinite(result.actions).all()
        assert result.frames.shape == (5, 256, 288, 3)
        assert result.latents.shape == (4, 2, 16, 18)
        assert (result.fps, result.seed) == (15.0, 5)
        assert "pick up the cup. This video contains" in result.prompt

    def test_state_history_and_noise_reach_the_answer(self, parts):
        pipeline = build(parts)
        plain = pipeline.run(observation(seed=5)).actions
        assert np.array_equal(pipeline.run(observation(seed=5)).actions, plain)
        for changes in (
            {"joint_position": np.zeros(7)},
            {"gripper_position": 0.9},
            {"history": np.ones((2, 8))},
            {"image": pictures(540, 640, seed=1)},
            {"prompt": "open the drawer"},
            {"seed": 6},
            {"noise": "torch"},
        ):
            other = pipeline.run(observation(**{"seed": 5, **changes})).actions
            assert other.shape == plain.shape
            assert not np.allclose(other, plain, atol=1e-6), changes

    def test_pose_policy(self, parts):
        pipeline = build(parts, contract=replace(CONTRACT, space=ActionSpace.POSE))
        pose = {"eef_position": [0.3, 0.1, 0.2], "eef_quaternion": [0.0, 0.0, 0.0, 1.0]}
        result = pipeline.run(observation(**pose))
        assert result.normalized.shape == (4, 10)
        assert result.actions.shape == (4, 8)
        np.testing.assert_allclose(np.linalg.norm(result.actions[:, 3:7], axis=1), 1, rtol=1e-5)

    def test_embodiments(self, parts):
        pipeline = build(parts)
        common = {"prompt": "go", "domain": "bridge_orig_lerobot", "tier": "256", "sampling": FAST}
        wam = pipeline.run(
            WorldActionRequest(**common, chunk=4, image=pictures(40, 40), decode_video=True)
        )
        assert wam.actions.shape == (4, 10)
        assert wam.frames.shape == (5, 32, 32, 3)
        actions = np.random.default_rng(0).normal(size=(4, 10))
        forward = pipeline.run(
            ForwardDynamicsRequest(**common, image=pictures(40, 40), actions=actions)
        )
        assert isinstance(forward, VideoResult)
        assert forward.frames.shape == (5, 32, 32, 3)
        other = pipeline.run(
            ForwardDynamicsRequest(**common, image=pictures(40, 40), actions=actions + 1)
        )
        assert not np.array_equal(other.frames, forward.frames)
        inverse = pipeline.run(InverseDynamicsRequest(**common, frames=pictures(5, 40, 40)))
        assert isinstance(inverse, PolicyResult)
        assert inverse.actions.shape == (4, 10)
        assert inverse.frames is None

    def test_generation(self, parts):
        pipeline = build(parts)
        common = {"prompt": "A cat", "height": 32, "width": 48, "sampling": FAST}
        image = pipeline.run(TextToImageRequest(**common))
        assert isinstance(image, ImageResult)
        assert image.image.shape == (32, 48, 3)
        assert image.seed == 0
        clip = pipeline.run(TextToVideoRequest(**common, frames=9, sound=True))
        assert clip.frames.shape == (9, 32, 48, 3)
        assert clip.frames.dtype == np.uint8
        assert clip.sound.shape == (2, 1920 * 10)
        assert clip.sample_rate == 48_000
        silent = pipeline.run(TextToVideoRequest(**common, frames=9))
        assert silent.sound is None
        continued = pipeline.run(
            ImageToVideoRequest(**common, frames=5, image=pictures(32, 48), return_latents=True)
        )
        again = parts["vae"].encode_frame(
            torch.from_numpy(pictures(32, 48)).permute(2, 0, 1) / 127.5 - 1
        )
        torch.testing.assert_close(continued.latents[:, 0], again, rtol=0, atol=1e-6)
        longer = pipeline.run(VideoToVideoRequest(**common, frames=9, clip=pictures(6, 32, 48)))
        assert longer.frames.shape == (9, 32, 48, 3)


def test_negative_prompt_and_guidance_matter(parts):
    pipeline = build(parts)
    request = TextToImageRequest(
        prompt="A cat", height=32, width=32, sampling=FAST, return_latents=True
    )
    plain = pipeline.run(request).latents
    other = pipeline.run(replace(request, negative_prompt="dog")).latents
    alone = pipeline.run(replace(request, sampling=Sampling(2, 1.0, 5.0))).latents
    ignored = pipeline.run(
        replace(request, sampling=Sampling(2, 1.0, 5.0), negative_prompt="dog")
    ).latents
    assert not torch.equal(plain, other)
    assert not torch.equal(plain, alone)
    assert torch.equal(alone, ignored)


def test_stages_are_timed(parts):
    times = build(parts).run(observation()).timing_ms
    stages = ["preprocess", "encode", "prefill", "noise", "denoise", "decode", "postprocess"]
    assert list(times) == [*stages, "total"]
    assert all(value >= 0 for value in times.values())
    assert times["total"] == pytest.approx(sum(times[stage] for stage in stages))
    assert times["denoise"] > 0


@pytest.mark.gpu
def test_stages_are_timed_on_the_device():
    watch = Stopwatch(torch.device("cuda"))
    torch.cuda._sleep(20_000_000)
    watch.mark("work")
    watch.mark("nothing")
    times = watch.milliseconds()
    assert times["work"] > 1
    assert times["nothing"] < times["work"]


class TestFaults:
    def test_unknown_requests(self, parts):
        with pytest.raises(ProcessingError, match="request is dict; allowed: PolicyRequest"):
            build(parts).run({})

    def test_prompt_must_be_text(self, parts):
        with pytest.raises(ProcessingError, match="prompt is None; it must be a string"):
            build(parts).run(observation(prompt=None))
        with pytest.raises(ProcessingError, match="negative_prompt is 5; it must be a string"):
            build(parts).run(TextToImageRequest(prompt="", negative_prompt=5))

    def test_long_prompts(self, parts):
        pipeline = build(parts, longest_prompt=300)
        with pytest.raises(ProcessingError, match=r"prompt has \d+ tokens .* allowed: 300"):
            pipeline.run(observation(prompt="pick " * 200))
        request = TextToImageRequest(
            prompt="A cat", negative_prompt="dog " * 200, height=32, width=32, sampling=FAST
        )
        with pytest.raises(ProcessingError, match="negative_prompt has"):
            pipeline.run(request)

    def test_noise_must_fit(self, parts):
        pipeline = build(parts)
        layout = Layout(1, 2, 2, (), 15.0)
        with pytest.raises(ProcessingError, match="noise has video of shape"):
            pipeline.run(observation(), noise=native_noise(0, 4, layout, (8, 8)))

    def test_tokenizer_must_fit(self, parts):
        large = replace(parts["tokenizer"], vocab_size=100_000)
        with pytest.raises(ProcessingError, match="has 100000 ids but the model embeds"):
            build(parts, tokenizer=large)

    def test_frames_need_the_decoder(self, parts, tiny_nano):
        pipeline = build(parts, vae=load_vae(tiny_nano / "vae", parts=("encoder",)))
        assert pipeline.run(observation()).frames is None
        with pytest.raises(ProcessingError, match="loaded without its decoder"):
            pipeline.run(observation(decode_video=True))

    def test_sound_needs_the_decoder(self, parts):
        request = TextToVideoRequest(prompt="", height=32, width=32, frames=5, sound=True)
        with pytest.raises(ProcessingError, match="no sound decoder"):
            build(parts, sound_decoder=None).run(request)


@pytest.mark.parametrize("name", ["tiny_nano", "tiny_edge"])
def test_bf16_stays_close_to_fp32(name, request):
    """The 4-step loop with guidance and a state row; processors round bf16 products differently."""
    folder = request.getfixturevalue(name)
    layout = Layout(3, 5, 6, (0,), 15.0, ActionLayout(9, 0, (0,), 8, 8))
    noise = native_noise(0, 4, layout, (32, 0))
    rows = torch.zeros(1, 32)
    rows[0, :8] = torch.linspace(-1, 1, 8)
    state = start(noise, layout, frames=torch.ones(4, 1, 5, 6), rows=rows)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_transformer(folder, params_dtype=dtype)
        texts = [model.prefill(torch.arange(3, 3 + length)) for length in (13, 10)]
        found.append(denoise(model, state, texts, layout, Sampling(4, 3.0, 5.0)))
    exact, half = found
    assert half.video.dtype == torch.float32
    for part, bar in (("video", 4e-2), ("action", 4e-2)):
        one, two = getattr(exact, part), getattr(half, part)
        assert (one - two).abs().max() <= bar * one.abs().max()
        assert torch.cosine_similarity(one.flatten(), two.flatten(), dim=0) >= 0.9995
