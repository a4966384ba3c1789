import json
import math

import pytest
import torch
from reach.data import sample_batch
from reach.losses import flow_matching_loss
from reach.normalisation import denormalise
from reach.policy import build_model, initial_tensors
from reach.train import (
    TrainingOptions,
    chunk_loss,
    learning_rate,
    parse_options,
    prepare,
    train,
)
from safetensors.torch import load_file


def test_prepare_normalises_and_pads(prompts, statistics, small_config):
    raw = sample_batch(5, torch.Generator().manual_seed(0), "cpu", prompts)
    ready = prepare(raw, statistics, small_config)
    assert ready.actions.shape == (5, 16, small_config.max_action_dim)
    assert ready.actions[..., 2:].count_nonzero() == 0
    back = denormalise(ready.actions[..., :2], statistics.action)
    torch.testing.assert_close(back, raw.actions, rtol=0, atol=1e-6)
    assert ready.tokens is raw.tokens


def test_loss_falls_on_one_batch(prompts, statistics, small_config):
    generator = torch.Generator().manual_seed(1)
    batch = prepare(sample_batch(8, generator, "cpu", prompts), statistics, small_config)
    model = build_model(small_config, initial_tensors(small_config, 0), "cpu")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for _ in range(25):
        value = chunk_loss(model, batch, torch.Generator().manual_seed(2))
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        values.append(value.item())
    assert values[-1] < 0.7 * values[0]
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    # The last language layer only gives keys and values to the expert.
    last = f"language.layers.{small_config.language.layers - 1}."
    assert all(name.startswith((last, "language.norm")) for name in missing)


def test_first_loss_is_that_of_a_zero_velocity(prompts, statistics, small_config):
    batch = prepare(
        sample_batch(64, torch.Generator().manual_seed(3), "cpu", prompts), statistics, small_config
    )
    model = build_model(small_config, initial_tensors(small_config, 0), "cpu")
    value = flow_matching_loss(
        model,
        batch.images,
        batch.tokens,
        batch.token_mask,
        batch.actions,
        torch.Generator().manual_seed(4),
    )
    expected = 1 + batch.actions.square().mean()
    assert value.item() == pytest.approx(float(expected), rel=0.05)


def test_a_short_run_exports_its_best_weights(tmp_path, small_config):
    out = tmp_path / "run"
    options = TrainingOptions(
        out=out, steps=4, batch=3, device="cpu", warmup=2, evaluate_every=2, episodes=2, log_every=2
    )
    entry = train(options, small_config)
    log = json.loads((out / "training.json").read_text())
    assert [e["step"] for e in log["evaluations"]] == [2, 4]
    assert entry in log["evaluations"]
    assert log["options"]["batch"] == 3
    assert (out / "config.json").is_file()
    stored = load_file(out / "model.safetensors")
    first = initial_tensors(small_config, 0)
    name = "paligemma_with_expert.gemma_expert.model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(stored[f"model.{name}"], first[name].bfloat16())


def test_learning_rate_warms_up_and_falls():
    options = TrainingOptions(out=None, learning_rate=2.0, warmup=10)
    assert learning_rate(options, 0, 0.0) == pytest.approx(0.2)
    assert learning_rate(options, 9, 0.0) == learning_rate(options, 500, 0.0) == 2.0
    assert learning_rate(options, 500, 0.5) == pytest.approx(2.0 * 0.51)
    assert learning_rate(options, 500, 1.0) == pytest.approx(2.0 * 0.02)


def test_budget_of_steps_and_of_minutes(tmp_path, small_config):
    """A stand-in for the loss sees as many steps as the budget allows."""
    calls = []

    def loss(model, batch, generator):
        calls.append(batch.actions.shape)
        return model.action_out_proj.bias.square().sum()

    options = TrainingOptions(
        out=tmp_path, steps=3, batch=2, device="cpu", evaluate_every=0, episodes=1
    )
    entry = train(options, small_config, loss)
    assert calls == [(2, 16, small_config.max_action_dim)] * 3
    assert entry["step"] == 3
    options = TrainingOptions(
        out=tmp_path, minutes=1e-6, batch=2, device="cpu", evaluate_every=0, episodes=1
    )
    assert train(options, small_config, loss)["step"] <= 1


def test_command_line_covers_every_option():
    options = parse_options(["--steps", "7", "--minutes", "1.5", "--bf16", "--out", "x"])
    assert options.steps == 7
    assert options.minutes == 1.5
    assert options.bf16
    assert options.out.name == "x"
    assert parse_options([]).minutes == math.inf
