"""Random requests: a plan whose sizes fit together, or a ProcessingError that names a field."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from phyai.models.cosmos3.domains import DOMAINS, Viewpoint
from phyai.models.cosmos3.droid import ActionSpace, PolicyContract
from phyai.models.cosmos3.normalizers import ActionNormalizer
from phyai.models.cosmos3.observations import CAMERAS, policy_request
from phyai.models.cosmos3.plan_actions import plan_embodiment, plan_policy
from phyai.models.cosmos3.plan_generation import plan_image, plan_video
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
from phyai.processing import Observation
from phyai.processing.errors import ProcessingError

from .droid_requests import picture, setup, views

VALUES = [
    None, True, 0, -1, 1, 3, 4, 5, 2**70, 1.5, 0.0, float("nan"), float("inf"), -1e39, "", "480",
    "256", "libero", "x", b"x", [], {}, [1.0], (1, 2), [float("nan")] * 7, [[1.0] * 8] * 2,
    object(), np.zeros(7), np.zeros((4, 10)), np.zeros((5, 8, 8, 3), np.uint8), np.full(3, "x"),
    np.zeros((8, 8)), np.zeros((8, 8, 3), np.int64), np.full((8, 8, 3), 7.0),
    np.full((8, 8, 3), np.nan), np.zeros((0, 8, 3), np.uint8), np.array(None, dtype=object),
]  # fmt: skip
# What the type of the field says, and the constructors of these objects check.
KEPT = ("sampling", "normalizer", "viewpoint", "seed", "noise", "return_latents", "prompt")


def pixels(draw, *lead):
    size = [draw.choice([1, 8, 17, 40]) for _ in range(2)]
    noise = np.random.default_rng(draw.randrange(2**32)).random((*lead, *size, 3))
    return (noise * 255).astype(np.uint8) if draw.random() < 0.7 else noise.astype(np.float32)


def sampling(draw):
    return draw.choice([None, Sampling(draw.randrange(1, 9), draw.choice([1.0, 3.0]), 5.0)])


def embodiment_request(draw):
    domain = draw.choice(sorted(DOMAINS))
    width = DOMAINS[domain].raw_dim or draw.choice([1, 7, 20])
    chunk = draw.choice([4, 8, 12])
    shared = {
        "prompt": draw.choice(["", "go", "Pick up.\nNow"]),
        "domain": domain,
        "raw_dim": None if DOMAINS[domain].raw_dim else width,
        "fps": draw.choice([None, 5, 12.5]),
        "tier": "256",
        "viewpoint": draw.choice(list(Viewpoint)),
        "sampling": sampling(draw),
    }
    if draw.random() < 0.3:
        shared["normalizer"] = ActionNormalizer(np.full(width, 2.0), np.zeros(width))
    kind = draw.choice([WorldActionRequest, ForwardDynamicsRequest, InverseDynamicsRequest])
    if kind is WorldActionRequest:
        return kind(**shared, chunk=chunk, image=pixels(draw))
    if kind is ForwardDynamicsRequest:
        return kind(**shared, image=pixels(draw), actions=np.zeros((chunk, width)))
    return kind(**shared, frames=pixels(draw, chunk + 1))


def generation_request(draw):
    size = {name: 16 * draw.choice([1, 2, 5]) for name in ("height", "width")}
    size |= {"prompt": draw.choice(["a cat", '{"a": 1}', ""]), "sampling": sampling(draw)}
    if draw.random() < 0.25:
        return TextToImageRequest(**size)
    size |= {"frames": draw.choice([9, 13]), "fps": draw.choice([5.0, 24]), "sound": False}
    kind = draw.choice([TextToVideoRequest, ImageToVideoRequest, VideoToVideoRequest])
    if kind is ImageToVideoRequest:
        return kind(**size, image=pixels(draw))
    if kind is VideoToVideoRequest:
        return kind(
            **size, clip=pixels(draw, draw.choice([5, 7])), take=draw.choice(["first", "last"])
        )
    return kind(**size)


def spoiled(draw, request, share):
    """Gives a share of the requests one field of another kind."""
    if draw.random() >= share:
        return request, None
    names = [item.name for item in fields(request) if item.name not in KEPT]
    name = draw.choice(names)
    return replace(request, **{name: draw.choice(VALUES)}), name


def check_plan(plan):
    layout = plan.layout
    assert layout.frames >= 1
    assert layout.height >= 1
    assert layout.width >= 1
    assert all(0 <= frame < layout.frames for frame in layout.clean_frames)
    assert math.isfinite(plan.fps)
    assert plan.fps > 0
    if plan.pixels is not None:
        assert plan.pixels.dtype == torch.float32
        assert plan.pixels.isfinite().all()
        assert plan.pixels.shape[0] == 3
        assert plan.cells is not None
        assert plan.cells[0] <= plan.pixels.shape[2] // 16
        assert plan.cells[1] <= plan.pixels.shape[3] // 16
    if plan.rows is not None:
        assert plan.rows.isfinite().all()
        assert plan.rows.shape == (len(layout.action.clean_rows), 64)
    if layout.action is not None:
        assert 1 <= layout.action.raw_dim <= 64
        if plan.actions is not None:
            chunk = layout.action.rows - len(layout.action.clean_rows)
            actions = plan.actions(np.zeros((chunk, layout.action.raw_dim)))
            assert len(actions) == chunk
            assert np.isfinite(actions).all()


def planned(planner, request, name, **changes):
    """Whether there is a plan; an error says what is wrong with which value."""
    return outcome(lambda: planner(request, setup(**changes)), may_fail=name is not None)


def outcome(make, *, may_fail=True):
    """Whether a plan is made, which is checked; a refusal says why."""
    try:
        plan = make()
    except ProcessingError as error:
        message = str(error)
    else:
        check_plan(plan)
        return True
    assert may_fail, message
    assert len(message) > 20
    return False


def test_embodiments(fuzz):
    def check(draw):
        request, name = spoiled(draw, embodiment_request(draw), 0.6)
        style = draw.choice(list(PromptStyle))
        return planned(plan_embodiment, request, name, style=style)

    fuzz("embodiments", check, 150, (0.3, 0.95))


def test_generation(fuzz):
    def check(draw):
        request, name = spoiled(draw, generation_request(draw), 0.6)
        planner = plan_image if isinstance(request, TextToImageRequest) else plan_video
        return planned(planner, request, name)

    fuzz("generation", check, 150, (0.3, 0.95))


def droid_request(draw, contract):
    """A policy request with views of one size, or one picture of all of them."""
    changes = {}
    if draw.random() < 0.3:
        changes = {
            "wrist": None,
            "exteriors": None,
            "image": picture(*draw.choice([(24, 32), (9, 9)])),
        }
    if contract.space is ActionSpace.POSE:
        changes |= {"eef_position": np.zeros(3), "eef_quaternion": np.array([0, 0, 0, 1.0])}
    return views(**changes)


@pytest.fixture(params=list(ActionSpace))
def contract(request):
    return PolicyContract(space=request.param)


def test_policies(contract, fuzz):
    def check(draw):
        request, name = spoiled(draw, droid_request(draw, contract), 0.8)
        return planned(plan_policy, request, name, contract=contract)

    fuzz("policies", check, 150, (0.15, 0.95))


def test_observations(contract, fuzz):
    """What a robot sends through the server, of any kind, is planned or refused."""

    def check(draw):
        names = [*CAMERAS, "image", "other"]
        images = {name: picture(9, 16, index) for index, name in enumerate(CAMERAS)}
        if draw.random() < 0.4:
            images = {name: draw.choice([picture(8, 8), *VALUES])
                      for name in draw.sample(names, draw.randrange(4))}  # fmt: skip
        state = draw.choice([np.zeros(8), np.array([0, 0, 0, 0, 0, 0, 1.0]), *VALUES])
        if draw.random() < 0.4:
            state = np.zeros(8) if contract.space is ActionSpace.JOINT_POSITION else np.eye(7)[6]
        task = draw.choice(["go", "", "é"])
        observation = Observation(images, state, task)
        return outcome(lambda: plan_policy(policy_request(observation, contract), setup(contract)))

    fuzz("observations", check, 150, (0.1, 0.9))
