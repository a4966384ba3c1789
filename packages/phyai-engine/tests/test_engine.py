import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from phyai.dispatch import PolicyError
from phyai.dispatch.config import KernelConfig
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phyai.guidance import Guidance
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.models.pi05.runtime import PI05Runtime
from phyai.processing import Observation, ProcessingError
from phyai_quant import QuantConfigError

TINY = Path(__file__).parent / "fixtures" / "pi05_tiny"
CONVROT = {
    "quantization": {
        "rules": [
            {
                "match": {"glob": "*.language_model.layers.*"},
                "weight": {"dtype": "int8", "granularity": "per_channel", "rotation_group": 16},
                "input": {"dtype": "int8", "granularity": "per_channel", "dynamic": True},
            }
        ]
    }
}


def build(*, dtype=torch.float32, policy=None, runtime=None, **args):
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint_dir=TINY, **args),
            config=EngineConfig(
                device=DeviceConfig(target="cpu", params_dtype=dtype),
                kernel=KernelConfig(policy_config=policy),
                runtime=runtime or RuntimeConfig(),
            ),
        )
    )


@pytest.fixture(scope="module")
def engine():
    return build()


def observe(engine, seed=0, cameras=None):
    described = engine.describe()
    generator = np.random.default_rng(seed)
    height, width = described["image_resolution"]
    names = described["cameras"] if cameras is None else cameras
    return Observation(
        images={n: generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for n in names},
        state=generator.uniform(-1, 1, described["state_dim"]).astype(np.float32),
        task="pick up the cup",
    )


def test_a_seed_fixes_the_chunk_and_noise_does_too(engine):
    seen = observe(engine)
    first, second = engine.infer(seen, seed=3), engine.infer(seen, seed=3)
    assert np.array_equal(first.actions, second.actions)
    assert not np.array_equal(first.actions, engine.infer(seen, seed=4).actions)
    described = engine.describe()
    shape = (1, described["chunk_size"], first.normalized.shape[1])
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    assert np.array_equal(first.normalized, engine.infer(seen, noise=noise).normalized)
    assert first.actions.shape == (described["chunk_size"], described["action_dim"])
    assert first.actions.dtype == np.float32
    assert "pick up the cup" in first.prompt
    assert set(first.timing_ms) == {"preprocess", "model", "postprocess", "total"}


def test_guidance_holds_the_chunk_near_the_one_before(engine):
    seen = observe(engine)
    before = torch.from_numpy(engine.infer(seen, seed=1).normalized)
    shape = (before.shape[0], before.shape[1])
    guidance = Guidance.build([before], shape, delay=shape[0], horizon=shape[0])
    free, guided = (
        torch.from_numpy(engine.infer(seen, seed=2, guidance=asked).normalized)
        for asked in (None, guidance)
    )
    assert (guided - before).norm() < 0.5 * (free - before).norm()


def test_a_family_without_guidance_says_so(engine, monkeypatch):
    assert engine.guides
    assert engine.describe()["guidance"] is True
    seen = observe(engine)
    chunk = engine.infer(seen, seed=1)
    back = engine.normalize_actions(chunk.actions, seen)
    varied = np.flatnonzero(np.ptp(chunk.actions, axis=0) > 1e-6)
    assert len(varied) == 3  # one column of the statistics has no spread
    np.testing.assert_allclose(back[:, varied], chunk.normalized[:, varied], atol=1e-5)

    class Plain:
        def infer(self, observations, *, noise, seed, num_steps):
            return [chunk]

    monkeypatch.setattr(engine, "plugin", Plain())
    assert not engine.guides
    assert engine.infer(seen) is chunk
    guidance = Guidance.build([None], chunk.normalized.shape, delay=0)
    for ask in (
        lambda: engine.infer(seen, guidance=guidance),
        lambda: engine.normalize_actions(chunk.actions, seen),
    ):
        with pytest.raises(ValueError, match="'pi05' takes no guidance; join the finished"):
            ask()


def test_without_a_seed_two_chunks_differ(engine):
    seen = observe(engine)
    assert not np.array_equal(engine.infer(seen).actions, engine.infer(seen).actions)


def test_a_batch_answers_as_its_items_do(engine):
    items = [observe(engine, 1), observe(engine, 2, engine.describe()["cameras"][:1])]
    noise = torch.randn(2, *engine.infer(items[0], seed=0).normalized.shape)
    together = engine.infer_batch(items, noise=noise)
    for index, item in enumerate(items):
        alone = engine.infer(item, noise=noise[index : index + 1])
        np.testing.assert_allclose(together[index].normalized, alone.normalized, atol=2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps is 0; it must be at least 1"),
        ({"noise": torch.zeros(1, 2, 3)}, r"noise has shape \(1, 2, 3\); this batch needs"),
    ],
)
def test_bad_arguments_are_named(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.infer(observe(engine), **arguments)


def test_noise_and_seed_exclude_each_other(engine):
    noise = torch.zeros(1, *engine.infer(observe(engine), seed=0).normalized.shape)
    with pytest.raises(ValueError, match="either noise or a seed"):
        engine.infer(observe(engine), noise=noise, seed=1)


@pytest.mark.usefixtures("recorded")
def test_a_warm_engine_records_nothing_more_for_another_prompt(engine, monkeypatch):
    engine.warm_up((1, 2))  # nothing to record without a runtime
    runtime = PI05Runtime(engine.plugin.model)
    monkeypatch.setattr(engine.plugin, "runtime", runtime)
    engine.warm_up((1, 2))
    recorded = runtime.graphs()
    assert recorded > 2 * 3
    for task in ("go", "pick up the cup and put it into the drawer behind the robot"):
        observation = dataclasses.replace(observe(engine), task=task)
        engine.infer(observation, seed=0)
        engine.infer_batch([observation] * 2, seed=0)
    assert runtime.graphs() == recorded
    engine.infer(observe(engine, cameras=engine.describe()["cameras"][:1]), seed=0)
    assert runtime.graphs() > recorded, "fewer cameras are recorded when they are seen"


def test_an_empty_batch_is_refused(engine):
    with pytest.raises(ValueError, match="no observation"):
        engine.infer_batch([])


def test_a_wrong_camera_is_named(engine):
    with pytest.raises(ProcessingError, match="base_0_rgp"):
        engine.infer(observe(engine, cameras=["base_0_rgp"]))


def test_every_call_site_is_explained_after_a_chunk(engine):
    engine.infer(observe(engine), seed=0)
    traces = engine.explain()
    assert all(trace.selected for trace in traces)
    found = {(trace.op, trace.role) for trace in traces}
    assert {
        ("gemm", "language"),
        ("attention_paged", "prefix"),
        ("attention_paged", "expert"),
    } <= found
    # The last language layer runs lean: its o_proj, gate_up and down never ask for a kernel.
    layers = engine.describe()["sizes"]["language"]["layers"]
    language = [trace for trace in traces if (trace.op, trace.role) == ("gemm", "language")]
    assert len(language) == 4 * layers - 3


def test_a_policy_quantizes_what_it_names_and_little_changes(engine):
    quantized = build(policy=CONVROT)
    formats = quantized.describe()["linear_formats"]
    layers = quantized.describe()["sizes"]["language"]["layers"]
    assert formats["convrot_int8_g16"] == 4 * layers - 3  # the last layer keeps keys and values
    assert quantized.weight_bytes() < engine.weight_bytes()
    seen = observe(engine)
    exact, rough = (e.infer(seen, seed=0).normalized for e in (engine, quantized))
    error = np.linalg.norm(exact - rough) / np.linalg.norm(exact)
    assert 0 < error < 0.1
    rows = {t.selected for t in quantized.explain() if (t.op, t.role) == ("gemm", "language")}
    assert rows == {"piper.gemm.convrot_int8"}


def test_two_engines_keep_their_own_policies(engine):
    build(policy=CONVROT)
    engine.infer(observe(engine), seed=0)
    rows = {t.selected for t in engine.explain() if (t.op, t.role) == ("gemm", "language")}
    assert rows == {"torch.gemm.bf16"}


def test_frozen_choices_give_the_same_chunk(engine):
    frozen = build(runtime=RuntimeConfig(freeze_kernel_choices=True))
    seen = observe(engine)
    first = frozen.infer(seen, seed=1)
    assert np.array_equal(first.actions, frozen.infer(seen, seed=1).actions)
    assert np.array_equal(first.actions, engine.infer(seen, seed=1).actions)


def test_a_rule_without_a_usable_kernel_is_an_error_with_reasons():
    policy = {
        "rules": [
            {
                "id": "fast",
                "match": {"op": "attention_paged"},
                "restrict_to": "flashinfer.attention_paged.fa2",
                "fallback": "error",
            }
        ],
    }
    blocked = build(policy=policy)
    with pytest.raises(RuntimeError, match=r"(?s)attention_paged.*fast.*flashinfer"):
        blocked.infer(observe(blocked))


def test_a_bad_policy_stops_the_engine():
    with pytest.raises(PolicyError, match="restrict_too"):
        build(policy={"rules": [{"restrict_too": "x"}]})


def test_a_rotation_group_that_does_not_fit_names_the_layer():
    policy = {"quantization": {"rules": [dict(CONVROT["quantization"]["rules"][0])]}}
    policy["quantization"]["rules"][0]["weight"] = {
        "dtype": "int8",
        "granularity": "per_channel",
        "rotation_group": 256,
    }
    with pytest.raises(QuantConfigError, match=r"language_model\.layers\.0"):
        build(policy=policy)


def test_a_rule_that_matches_nothing_is_reported():
    policy = {"quantization": {"rules": [dict(CONVROT["quantization"]["rules"][0])]}}
    policy["quantization"]["rules"][0]["match"] = {"glob": "*.langage_model.*"}
    with pytest.warns(UserWarning, match="matches no layer"):
        build(policy=policy)


def test_unknown_plugin_lists_the_known_ones():
    known = "known: cosmos3, cosmos3_policy, pi05"
    with pytest.raises(ValueError, match=f"no model plugin 'pi06'; {known}"):
        Engine(EngineArgs("pi06", None, EngineConfig(DeviceConfig("cpu"))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_close(engine, dtype):
    seen = observe(engine)
    exact = engine.infer(seen, seed=0).normalized
    rough = build(dtype=dtype).infer(seen, seed=0).normalized
    assert np.linalg.norm(exact - rough) / np.linalg.norm(exact) < 0.05
