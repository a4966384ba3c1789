"""What each request means for the model, and what is refused."""

import numpy as np
import pytest
import torch

from phyai.models.cosmos3.domains import DOMAINS, Viewpoint
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.normalizers import ActionNormalizer
from phyai.models.cosmos3.plan_actions import plan_embodiment
from phyai.models.cosmos3.plan_generation import plan_image, plan_video
from phyai.models.cosmos3.plans import Setup, latent_frames
from phyai.models.cosmos3.prompts import SYSTEM_IMAGE, SYSTEM_VIDEO, PromptStyle
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
from phyai.models.cosmos3.state import ActionLayout, Layout
from phyai.processing.errors import ProcessingError


def setup(**changes):
    given = {
        "device": torch.device("cpu"),
        "action_dim": 64,
        "domains": tuple(range(32)),
        "sound": lambda frames, fps: round(25 * frames / fps),
        "contract": PolicyContract.nano(),
        "style": PromptStyle.NATIVE,
        "system_prompt": False,
    }
    return Setup(**given | changes)


def pictures(*shape):
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


class TestEmbodiments:
    def test_published_table(self):
        widths = {name: (domain.id, domain.raw_dim) for name, domain in DOMAINS.items()}
        assert widths["av"] == (1, 9)
        assert widths["agibotworld"] == widths["agibot_gear_gripper"] == (15, 29)
        assert widths["hand_pose"] == (3, None)
        assert widths["fractal"] == (20, 10)
        assert widths["droid_lerobot"] == widths["robomind-franka"] == (8, 10)
        presets = {name: (d.chunk, d.fps, d.tier) for name, d in DOMAINS.items()}
        assert presets["av"] == (60, 10.0, "480")
        assert presets["camera_pose"] == (60, 30.0, "480")
        assert presets["bridge_orig_lerobot"] == (16, 5.0, "480")
        assert presets["libero"] == (16, 10.0, "256")
        assert presets["pusht"] == (16, 10.0, "256")
        assert presets["hand_pose"] == (16, 24.0, "480")

    def test_presets_of_the_domain(self):
        request = WorldActionRequest(prompt="go", domain="camera_pose", image=pictures(480, 832))
        plan = plan_embodiment(request, setup())
        assert plan.layout == Layout(16, 30, 52, (0,), 30.0, ActionLayout(60, 1, (), 9, 2))
        assert plan.sampling == Sampling(30, 1.0, 10.0)
        assert not plan.video
        assert Viewpoint.EGO.sentence in plan.prompt
        assert "The video is 2.0 seconds long and is of 30 FPS." in plan.prompt

    def test_request_overrides_presets(self):
        request = WorldActionRequest(
            prompt="go",
            domain="libero",
            raw_dim=7,
            chunk=8,
            fps=20.0,
            tier="480",
            viewpoint=Viewpoint.THIRD_PERSON,
            view_description="The robot is red.",
            image=pictures(64, 64),
            decode_video=True,
            sampling=Sampling(2, 2.0, 5.0),
        )
        plan = plan_embodiment(request, setup())
        assert plan.layout == Layout(3, 4, 4, (0,), 20.0, ActionLayout(8, 1, (), 7, 5))
        assert plan.pixels.shape == (3, 1, 640, 640)
        assert plan.video
        assert plan.sampling.steps == 2
        text = f"go. {Viewpoint.THIRD_PERSON.sentence} The robot is red. The video is 0.0"
        assert plan.prompt.startswith(text)

    def test_forward_dynamics(self):
        actions = np.arange(8.0).reshape(4, 2)
        normalizer = ActionNormalizer(np.array([2.0, 4.0]), np.array([1.0, 0.0]))
        request = ForwardDynamicsRequest(
            prompt="", domain="pusht", image=pictures(9, 9), actions=actions, normalizer=normalizer
        )
        plan = plan_embodiment(request, setup())
        assert plan.layout == Layout(2, 1, 1, (0,), 10.0, ActionLayout(4, 1, (0, 1, 2, 3), 2, 4))
        assert plan.rows.shape == (4, 64)
        assert torch.equal(plan.rows[:, :2], torch.tensor((actions - [1, 0]) / [2, 4]).float())
        assert not plan.rows[:, 2:].any()
        assert plan.actions is None
        assert plan.video

    def test_inverse_dynamics(self):
        normalizer = ActionNormalizer(np.full(10, 2.0), np.full(10, 1.0))
        request = InverseDynamicsRequest(
            prompt="", domain="umi", tier="256", frames=pictures(9, 20, 20), normalizer=normalizer
        )
        plan = plan_embodiment(request, setup())
        assert plan.layout == Layout(3, 1, 1, (0, 1, 2), 10.0, ActionLayout(8, 1, (), 10, 6))
        assert plan.pixels.shape == (3, 9, 256, 256)
        assert plan.rows is None
        assert not plan.video
        assert (plan.actions(np.full((8, 10), 3.0)) == 7).all()

    def test_edge_and_diffusers_read_json(self):
        request = WorldActionRequest(
            prompt="go", domain="umi", tier="256", image=pictures(20, 20), view_description="Red."
        )
        for changes in ({"contract": PolicyContract.edge()}, {"style": PromptStyle.DIFFUSERS}):
            plan = plan_embodiment(request, setup(**changes))
            assert plan.prompt.startswith('{"cinematography": {"framing": "This video is captured')
            assert 'scene. Red."}' in plan.prompt

    def test_system_message_of_diffusers(self):
        request = WorldActionRequest(prompt="go", domain="umi", image=pictures(20, 20), tier="256")
        assert plan_embodiment(request, setup(system_prompt=True)).system == SYSTEM_VIDEO

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"domain": "mars"}, "domain is 'mars'; known: abc_yam"),
            ({"domain": "libero"}, "depends on the data set; set raw_dim"),
            ({"raw_dim": 65}, "raw_dim is 65; allowed: 1 to 64"),
            ({"raw_dim": 0}, "raw_dim is 0"),
            ({"chunk": 6}, "chunk is 6; allowed: multiples of 4, at least 4"),
            ({"chunk": 0}, "chunk is 0"),
            ({"chunk": 4.5}, "chunk is 4.5"),
            ({"raw_dim": 2.5}, "raw_dim is 2.5"),
            ({"fps": "5"}, "fps is '5'"),
            ({"fps": 0.0}, "fps is 0.0"),
            ({"fps": float("nan")}, "fps is nan"),
            ({"tier": "512"}, "tier is '512'"),
            ({"image": np.zeros((4, 4), np.uint8)}, "'image' must be a clip"),
            (
                {"normalizer": ActionNormalizer(np.ones(3), np.ones(3))},
                "has 3 columns but an action has 10",
            ),
        ],
    )
    def test_bad_requests_are_named(self, changes, message):
        given = {"prompt": "go", "domain": "umi", "image": pictures(20, 20), **changes}
        with pytest.raises(ProcessingError, match=message):
            plan_embodiment(WorldActionRequest(**given), setup())

    @pytest.mark.parametrize(
        ("actions", "chunk", "message"),
        [
            (np.ones((4, 3)), None, r"has shape \(4, 3\) .*expected nx2 finite numbers"),
            (np.ones((8, 2)), 4, "expected 4x2"),
            (np.ones((5, 2)), None, "chunk is 5"),
            (np.ones(4), None, r"has shape \(4,\)"),
            (np.full((4, 2), np.inf), None, "not finite"),
            (np.full((4, 2), 1e39), None, "not finite"),
            (np.full((4, 2), "x"), None, "dtype <U1"),
            ([[1.0, 2.0], [3.0]], None, "'actions' is no array"),
            (None, None, "'actions' is missing"),
        ],
    )
    def test_bad_actions_are_named(self, actions, chunk, message):
        request = ForwardDynamicsRequest(
            prompt="", domain="pusht", image=pictures(9, 9), actions=actions, chunk=chunk
        )
        with pytest.raises(ProcessingError, match=message):
            plan_embodiment(request, setup())

    def test_clip_must_have_one_picture_more_than_actions(self):
        request = InverseDynamicsRequest(
            prompt="", domain="umi", tier="256", frames=pictures(8, 20, 20), chunk=8
        )
        with pytest.raises(ProcessingError, match="8 pictures but chunk is 8"):
            plan_embodiment(request, setup())

    def test_untrained_domain_is_named(self):
        request = WorldActionRequest(prompt="", domain="maniparena", image=pictures(20, 20))
        with pytest.raises(ProcessingError, match="id 23, which is not served"):
            plan_embodiment(request, setup(domains=(8, 15)))


class TestGeneration:
    def test_picture(self):
        plan = plan_image(TextToImageRequest(prompt="A cat"), setup())
        assert plan.layout == Layout(1, 64, 64, (), 24.0)
        assert plan.sampling == Sampling(50, 4.0, 3.0)
        assert plan.prompt == "A cat. This image is of 1024x1024 resolution."
        assert plan.negative == ""

    def test_clip_with_sound(self):
        request = TextToVideoRequest(prompt="A cat", sound=True, negative_prompt="dog")
        plan = plan_video(request, setup())
        assert plan.layout == Layout(48, 45, 80, (), 24.0, sound_frames=197)
        assert plan.sampling == Sampling(35, 6.0, 10.0)
        assert plan.negative == "dog"
        assert plan.system is None

    def test_continued_picture(self):
        request = ImageToVideoRequest(
            prompt="A cat", height=32, width=48, frames=5, image=pictures(64, 96)
        )
        plan = plan_video(request, setup())
        assert plan.layout.clean_frames == (0,)
        assert plan.pixels.shape == (3, 1, 32, 48)

    @pytest.mark.parametrize("take", ["first", "last"])
    def test_continued_clip(self, take):
        clip = pictures(7, 32, 32)
        request = VideoToVideoRequest(
            prompt="A cat", height=32, width=32, frames=13, clip=clip, take=take
        )
        plan = plan_video(request, setup())
        assert plan.layout == Layout(4, 2, 2, (0, 1), 24.0)
        kept = clip[:5] if take == "first" else clip[-5:]
        expected = torch.from_numpy(kept).permute(3, 0, 1, 2) / 127.5 - 1
        assert torch.equal(plan.pixels, expected)

    def test_texts_of_both_styles(self):
        request = TextToVideoRequest(prompt="A cat..", negative_prompt="dog", frames=5)
        plan = plan_video(request, setup(style=PromptStyle.DIFFUSERS, system_prompt=True))
        assert plan.prompt.startswith("A cat. The video is 0.2 seconds")
        assert plan.negative.startswith("dog. The video is not 0.2 seconds")
        assert plan.system == SYSTEM_VIDEO
        picture = plan_image(TextToImageRequest(prompt=""), setup(system_prompt=True))
        assert picture.system == SYSTEM_IMAGE

    def test_captions_that_say_it_themselves(self):
        caption = '{"subject": "cat"}'
        assert plan_image(TextToImageRequest(prompt=caption), setup()).prompt == caption
        bare = TextToImageRequest(prompt="A cat", metadata=False)
        assert plan_image(bare, setup()).prompt == "A cat"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"frames": 6}, r"frames is 6; allowed: 1 \+ multiples of 4, at least 1"),
            ({"frames": 0}, "frames is 0"),
            ({"frames": 1}, "at least 5 here"),
            ({"height": 24}, "height is 24; allowed: multiples of 16, at least 16"),
            ({"width": 0}, "width is 0"),
            ({"fps": 0.0}, "fps is 0.0"),
            ({"fps": float("inf")}, "fps is inf"),
            ({"fps": "24"}, "fps is '24'"),
            ({"frames": 9.0}, "frames is 9.0"),
            ({"frames": None}, "frames is None"),
            ({"height": "64"}, "height is '64'"),
            ({"width": True}, "width is True"),
        ],
    )
    def test_bad_clips_are_named(self, changes, message):
        with pytest.raises(ProcessingError, match=message):
            plan_video(TextToVideoRequest(prompt="", **changes), setup())

    def test_other_faults_are_named(self):
        with pytest.raises(ProcessingError, match="width is 15"):
            plan_image(TextToImageRequest(prompt="", width=15), setup())
        with pytest.raises(ProcessingError, match="no sound decoder"):
            plan_video(TextToVideoRequest(prompt="", sound=True), setup(sound=None))
        short = {"prompt": "", "height": 32, "width": 32, "clip": pictures(4, 9, 9)}
        with pytest.raises(ProcessingError, match="'clip' has 4 pictures"):
            plan_video(VideoToVideoRequest(**short), setup())
        clip = short | {"clip": pictures(5, 9, 9)}
        with pytest.raises(ProcessingError, match="take is 'middle'; allowed: first, last"):
            plan_video(VideoToVideoRequest(**clip, take="middle"), setup())
        with pytest.raises(ProcessingError, match="at least 9 here"):
            plan_video(VideoToVideoRequest(**clip, frames=5), setup())


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (5, 2), (33, 9), (189, 48)])
def test_latent_frames(frames, latents):
    assert latent_frames(frames) == latents
