"""Observations of a DROID robot, and a model to plan them for."""

import numpy as np
import torch

from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.plans import Setup
from phyai.models.cosmos3.prompts import PromptStyle
from phyai.models.cosmos3.requests import PolicyRequest

JOINTS = np.array([0.1, -0.2, 0.3, -2.1, 0.5, 1.6, 0.7])
QUATERNION = np.array([0.1, 0.7, -0.3, 0.64])


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def views(**changes):
    given = {
        "prompt": "pick up the cup",
        "wrist": picture(360, 640, 1),
        "exteriors": [picture(360, 640, 2), picture(360, 640, 3)],
        "joint_position": JOINTS,
        "gripper_position": 0.25,
    }
    return PolicyRequest(**given | changes)


def setup(contract=None, **changes):
    given = {
        "device": torch.device("cpu"),
        "action_dim": 64,
        "domains": tuple(range(32)),
        "sound": None,
        "contract": contract or PolicyContract.nano(),
        "style": PromptStyle.NATIVE,
        "system_prompt": False,
    }
    return Setup(**given | changes)
