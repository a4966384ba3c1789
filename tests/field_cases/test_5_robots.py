"""Robots: policies, processors and serving."""

import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai.checkpoints import CheckpointReader
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05 import bench
from phyai.models.pi05.captured import CapturedDenoise
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.keys import canonical
from phyai.models.pi05.loading import load_pi05
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.models.pi05.runtime import PI05Runtime
from phyai.processing import ModelInputs, PolicyProcessor, ProcessingError


@pytest.fixture(scope="module")
def model(tiny_pi05):
    return load_pi05(tiny_pi05, device="cpu", params_dtype=torch.float32)


@pytest.fixture(scope="module")
def cases(tiny_pi05):
    return load_file(tiny_pi05 / "cases.safetensors")


def model_inputs(cases, group):
    """What the reference implementation got; absent images are black."""
    images, mask = cases[f"{group}.images"].float() / 127.5 - 1, cases[f"{group}.image_mask"]
    images[~mask] = -1.0
    tokens, token_mask = cases[f"{group}.tokens"], cases[f"{group}.token_mask"]
    return ModelInputs(images, mask, tokens, token_mask, None, ("",) * len(mask))


def test_case_79_each_stage_equals_the_reference_implementation(model, cases):
    """With fixed noise, each stage of π0.5 equals that of another implementation.

    Handled in phyai.models.pi05.
    """
    group = "mixed_cameras"
    inputs, noise = model_inputs(cases, group), cases[f"{group}.noise"]
    with torch.inference_mode():
        images = model.vision(inputs.images.flatten(0, 1)).unflatten(0, inputs.images.shape[:2])
        first = noise - model.sample_actions(inputs, noise=noise, num_steps=1)
        actions = model.sample_actions(inputs, noise=noise)
    for found, name in (
        (images, "stage.image_features"),
        (first, "stage.first_velocity"),
        (actions, "actions_10"),
    ):
        torch.testing.assert_close(found, cases[f"{group}.{name}"], atol=1e-5, rtol=0, msg=name)


def test_case_80_no_other_package_is_patched_or_needed(
    tiny_pi05, monkeypatch, observation, sources
):
    """A policy loads and acts where transformers and openpi cannot be imported.

    Handled in phyai.models.pi05.
    """

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("transformers", "openpi", "lerobot"):
                raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("transformers", "openpi", "lerobot"):
            monkeypatch.delitem(sys.modules, name)
    device = DeviceConfig("cpu", torch.float32)
    args = EngineArgs("pi05", PI05Args(checkpoint_dir=tiny_pi05), EngineConfig(device=device))
    chunk = Engine(args).infer(observation, seed=0)
    assert np.isfinite(chunk.actions).all()
    patching = re.compile(r"^\s*(import|from) transformers\b|transformers_replace", re.MULTILINE)
    assert not [file for file in sources if patching.search(file.read_text(encoding="utf-8"))]


def shape_of(folder):
    return PI05Config.read(folder, CheckpointReader(folder, canonical).shapes)


def statistics(folder):
    (file,) = folder.glob("policy_preprocessor*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_case_82_placeholder_statistics_are_refused(tiny_pi05, tmp_path, value):
    """Statistics that are infinite placeholders are refused with feature, file and column.

    Handled in phyai.processing.normalize.
    """
    found = {name: torch.full_like(column, value) for name, column in statistics(tiny_pi05).items()}
    save_file(found, tmp_path / "stats.safetensors")
    with pytest.raises(ProcessingError, match=rf"q\d\d is {value} in column 0") as caught:
        PolicyProcessor.from_checkpoint(
            tiny_pi05, shape_of(tiny_pi05), stats=tmp_path / "stats.safetensors"
        )
    assert "stats.safetensors" in str(caught.value)


def test_case_83_a_state_is_normalised_without_an_action(tiny_pi05, observation):
    """The state of an observation, which never brings an action, is normalised.

    Handled in phyai.processing.pipeline.
    """
    processor = PolicyProcessor.from_checkpoint(tiny_pi05, shape_of(tiny_pi05))
    seen, stats = observation, statistics(tiny_pi05)
    low, high = (stats[f"observation.state.{name}"].numpy() for name in ("q01", "q99"))
    edges = np.linspace(-1, 1, 257)[:-1]
    normal = 2 * (seen.state - low) / np.where(high > low, high - low, 1e-8) - 1
    bins = [int((value >= edges).sum()) - 1 for value in normal]
    (prompt,) = processor.preprocess([seen]).prompts
    assert f"State: {' '.join(map(str, bins))};" in prompt


def test_case_85_a_chunk_is_normalised_by_the_statistics_of_the_data(tiny_pi05, observation):
    """Actions are scaled by the statistics of the data set, whatever else is in the chunk.

    Handled in phyai.processing.normalize, phyai.processing.pipeline.
    """
    processor = PolicyProcessor.from_checkpoint(tiny_pi05, shape_of(tiny_pi05))
    seen, width = observation, processor.spec.action_dim
    stats = statistics(tiny_pi05)
    low, high = (stats[f"action.{name}"].numpy()[:width] for name in ("q01", "q99"))
    draw = np.random.default_rng(0)
    rows = low + (high - low) * draw.uniform(-0.5, 1.5, (7, width))
    for chunk in (rows, rows[:1], np.repeat(rows[2:3], 5, axis=0), rows * 0 + low):
        normalized = processor.normalize_actions(chunk.astype(np.float32), seen)
        expected = 2 * (chunk - low) / np.where(high > low, high - low, np.inf) - 1
        np.testing.assert_allclose(normalized[:, :width], expected, atol=1e-5)
        back = processor.postprocess(torch.from_numpy(normalized)[None], [seen])[0]
        np.testing.assert_allclose(back, np.where(high > low, chunk, low), atol=1e-5)


def test_case_94_other_prompts_record_no_new_graph(model, recorded):
    """After the warm-up, prompts of any length replay graphs that exist.

    Handled in phyai.models.pi05.runtime, phyai.models.pi05.staging.
    """
    runtime, config = PI05Runtime(model), model.config
    runtime.warm_up()
    count = len(recorded)
    cameras = len(config.cameras)
    for length in (0, 1, 7, config.tokenizer_max_length):
        tokens = torch.ones(1, config.tokenizer_max_length, dtype=torch.int64)
        mask = torch.arange(config.tokenizer_max_length)[None] < length
        images = torch.zeros(1, cameras, 3, *config.image_resolution)
        present = torch.ones(1, cameras, dtype=torch.bool)
        inputs = ModelInputs(images, present, tokens * mask, mask, None, ("",))
        found = runtime.sample_actions(inputs, seed=0)
        expected = model.sample_actions(inputs, seed=0)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert len(recorded) == count == runtime.graphs()


class Clock:
    """Stands for a CUDA event; every record is one millisecond later."""

    now = 0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        Clock.now += 1
        self.at = Clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(later.at - self.at)


def test_case_95_the_denoising_loop_is_one_graph_timed_by_events(
    model, cases, recorded, monkeypatch
):
    """All denoising steps are one replay, and the benchmark times replays by events.

    Handled in phyai.models.pi05.captured, phyai.models.pi05.bench.
    """
    inputs, noise = model_inputs(cases, "single"), cases["single.noise"]
    with torch.inference_mode():
        loop = CapturedDenoise(model, *model.encode_prefix(inputs))
        assert len(recorded) == 1
        actions = loop(*model.encode_prefix(inputs), noise)
    assert len(recorded) == 1
    torch.testing.assert_close(actions, cases["single.actions_10"], atol=1e-5, rtol=0)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(bench, "kernel_times", lambda replay: [])
    setting = bench.Setting("one view", 1, 2, chunk=model.config.chunk_size)
    found = bench.measure(PI05Runtime(model), setting, replays=3)
    assert {stage: found["ms"][stage]["p50"] for stage in bench.STAGES} == dict.fromkeys(
        bench.STAGES, 1.0
    )
