"""The model of the example package, by its name, in an engine and in a server."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from phyai.checkpoints import CheckpointError
from phyai.dispatch import KernelConfig
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.processing import Observation, ProcessingError
from phyai.serving import PolicyConfig
from phyai.serving.loading import load_policy
from phyai.serving.runner import Runner

ROOT = Path(__file__).parents[1]
STATE, WIDTH, HIDDEN, CHUNK, ACTION = 5, 32, 64, 6, 3
POLICY = """
schema: phyai.kernel/v1
quantization:
  rules:
    - match: {glob: 'mlp.*'}
      weight: {dtype: int8, granularity: per_channel, rotation_group: 16}
      input: {dtype: int8, granularity: per_channel, dynamic: true}
"""


@pytest.fixture(autouse=True)
def _installed(install_package):
    install_package(ROOT)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(3)
    sizes = {
        "encoder": (WIDTH, STATE),
        "mlp.fc1": (HIDDEN, WIDTH),
        "mlp.fc2": (WIDTH, HIDDEN),
        "head": (CHUNK * ACTION, WIDTH),
    }
    found = {}
    for name, (rows, columns) in sizes.items():
        found[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        found[f"{name}.bias"] = torch.randn(rows, generator=generator)
    return found


def checkpoint(folder, tensors, action_dim=ACTION):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"action_dim": action_dim}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def engine(folder, policy=None):
    from phyai_models_example.state_policy import StatePolicyArgs

    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        kernel=KernelConfig(config_path=policy),
    )
    return Engine(EngineArgs("example_state", StatePolicyArgs(folder), config))


def observations(count):
    states = np.random.default_rng(1).normal(size=(count, STATE)).astype(np.float32)
    return [Observation({}, state, f"task {number}") for number, state in enumerate(states)]


def expected(tensors, observations):
    def layer(name, x):
        return functional.linear(
            x, tensors[f"{name}.weight"].double(), tensors[f"{name}.bias"].double()
        )

    features = layer(
        "encoder", torch.tensor(np.stack([each.state for each in observations])).double()
    )
    hidden = functional.gelu(layer("mlp.fc1", features), approximate="tanh")
    actions = layer("head", features + layer("mlp.fc2", hidden))
    return actions.reshape(len(observations), CHUNK, ACTION).numpy()


@pytest.mark.parametrize("count", [1, 7])
def test_the_engine_runs_it_by_its_name(tmp_path, tensors, count):
    asked = observations(count)
    chunks = engine(checkpoint(tmp_path / "policy", tensors)).infer_batch(asked)
    found = np.stack([chunk.actions for chunk in chunks])
    np.testing.assert_allclose(found, expected(tensors, asked), rtol=1e-5, atol=1e-5)
    assert [chunk.prompt for chunk in chunks] == [each.task for each in asked]


def test_a_policy_quantizes_its_layers_and_the_calls_are_explained(tmp_path, tensors):
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    small = engine(checkpoint(tmp_path / "policy", tensors), file)
    asked = observations(4)
    found = np.stack([chunk.actions for chunk in small.infer_batch(asked)])
    wanted = expected(tensors, asked)
    assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.03
    formats = small.describe()["linear_formats"]
    assert formats["encoder"] == formats["head"] == "bf16"
    assert formats["mlp.fc1"] == formats["mlp.fc2"] == "convrot_int8_g16"
    kernels = {(trace.role, trace.selected) for trace in small.explain()}
    assert ("trunk", "piper.gemm.convrot_int8") in kernels
    assert ("head", "torch.gemm.bf16") in kernels


def test_it_is_served_by_its_name(tmp_path, tensors):
    (asked,) = observations(1)
    folder = checkpoint(tmp_path / "policy", tensors)
    runner = Runner(load_policy(PolicyConfig(folder, plugin="example_state", device="cpu")))
    runner.warm_up()
    answer = runner.run_one({"state": asked.state, "prompt": asked.task})
    np.testing.assert_allclose(answer.actions, expected(tensors, [asked])[0], rtol=1e-5, atol=1e-5)
    known = runner.metadata()
    assert (known["model"], known["action_dim"], known["image_keys"]) == ("example_state", 3, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda policy: delattr(policy, "serving_args"), "'example_state' can not be .*serving_ar"),
        (lambda policy: setattr(policy, "describe", lambda self: {}), "lacks image_resolution, ch"),
    ],
)
def test_a_family_that_can_not_be_served_is_refused(
    tmp_path, tensors, monkeypatch, change, message
):
    from phyai_models_example import state_policy

    changed = type("Changed", (), dict(vars(state_policy.StatePolicy)))
    change(changed)
    monkeypatch.setattr(state_policy, "StatePolicy", changed)
    folder = checkpoint(tmp_path / "policy", tensors)
    with pytest.raises(ValueError, match=message):
        load_policy(PolicyConfig(folder, plugin="example_state", device="cpu"))


def test_what_does_not_fit_is_named(tmp_path, tensors):
    for size in (4, 0, None):
        with pytest.raises(CheckpointError, match=rf"config\.json: action_dim {size} does not"):
            engine(checkpoint(tmp_path / "policy", tensors, action_dim=size))
    whole = engine(checkpoint(tmp_path / "policy", tensors))
    del tensors["mlp.fc2.bias"]
    with pytest.raises(CheckpointError, match=r"mlp\.fc2\.bias"):
        engine(checkpoint(tmp_path / "less", tensors))
    with pytest.raises(ProcessingError, match="give 5 numbers"):
        whole.infer(Observation({}, np.zeros(4, np.float32), ""))
