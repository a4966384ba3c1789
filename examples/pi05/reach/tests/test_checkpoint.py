"""The shipped policy: small, quantizable, successful, and obedient to the instruction."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reach.env import ReachEnv
from reach.evaluate import EngineRollout, evaluate, to_observation
from reach.world import move

from phyai.dispatch.config import KernelConfig
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05.main_pi05 import PI05Args

REACH = Path(__file__).resolve().parents[1]
CHECKPOINT = REACH / "checkpoint"
INT8_POLICY = REACH.parent / "kernel_policies" / "convrot_int8.yaml"
EPISODES = 12


def build(dtype=torch.float32, policy=None):
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint_dir=CHECKPOINT),
            config=EngineConfig(
                device=DeviceConfig(target="cpu", params_dtype=dtype),
                kernel=KernelConfig(config_path=policy),
            ),
        )
    )


@pytest.fixture(scope="module")
def engine():
    return build()


def test_size_and_widths(engine):
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 12_000_000
    sizes = engine.describe()["sizes"]
    for part in ("language", "expert"):
        assert sizes[part]["head_dim"] == 64
        assert sizes[part]["width"] % 128 == 0
        assert sizes[part]["mlp"] % 128 == 0


def test_no_trained_gate_is_closed(engine):
    """A policy whose adaptive gates are zero would pass tests of everything but its expert."""
    step = engine.plugin.model.modulate(torch.tensor([0.5]))
    for layer in step.layers:
        for modulation in (layer.attention, layer.mlp):
            assert modulation.chunk(3, dim=1)[2].abs().mean() > 0.05


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, INT8_POLICY)],
    ids=["fp32", "bf16", "convrot_int8"],
)
def test_success(dtype, policy):
    result = evaluate(EngineRollout(build(dtype, policy)), episodes=EPISODES, seed=500)
    assert result.success_rate >= 0.95


def aim(engine, env, observation, task):
    """Where the chunk leads when the instruction is ``task``."""
    seen = replace(to_observation(observation), task=task)
    pointer = env.pointer
    for action in engine.infer(seen, seed=0).actions:
        pointer = move(pointer, torch.from_numpy(np.asarray(action, dtype=np.float32))[None])
    return pointer.position[0]


def test_the_instruction_decides_which_disc_is_reached(engine):
    env = ReachEnv()
    observation, _ = env.reset(seed=3)
    layout = env.layout
    from reach.instructions import COLOUR_NAMES

    for disc in range(layout.discs.shape[1]):
        colour = COLOUR_NAMES[layout.colours[0, disc]]
        end = aim(engine, env, observation, f"reach the {colour} disc")
        assert (layout.discs[0] - end).norm(dim=1).argmin() == disc


def test_int8_stays_close_to_fp32(engine):
    env = ReachEnv()
    quantized = build(torch.float32, INT8_POLICY)
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        seen = to_observation(observation)
        exact, rough = (e.infer(seen, seed=seed).normalized for e in (engine, quantized))
        cosine = (exact * rough).sum() / (np.linalg.norm(exact) * np.linalg.norm(rough))
        assert cosine > 0.999
