"""Pipelines of a tiny repository, and a request that they answer quickly."""

from dataclasses import replace

import numpy as np
import torch

from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.pipeline import Cosmos3Pipeline
from phyai.models.cosmos3.requests import PolicyRequest
from phyai.models.cosmos3.sampler import Sampling

CPU = torch.device("cpu")
CONTRACT = replace(PolicyContract.nano(), chunk=4, tier="256")
FAST = Sampling(2, 3.0, 5.0)


def pictures(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)


def observation(**changes):
    given = {
        "prompt": "pick up the cup",
        "image": pictures(540, 640),
        "joint_position": np.linspace(-1, 1, 7),
        "gripper_position": 0.25,
        "sampling": FAST,
    }
    return PolicyRequest(**given | changes)


def build(parts, **options):
    return Cosmos3Pipeline(**{**parts, "device": CPU, "contract": CONTRACT, **options})
