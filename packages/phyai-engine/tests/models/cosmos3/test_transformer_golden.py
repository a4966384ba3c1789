"""The transformer against diffusers' ``Cosmos3OmniTransformer`` on the same weights and inputs.

``scripts/build_cosmos3_transformer_fixtures.py`` wrote the fixtures. The smallest deviation that
the bound has to tell, a timestep rounded to bf16, moves velocities by 5e-4 of the largest.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from phyai.models.cosmos3.loading import load_transformer
from phyai.models.cosmos3.positions import media_positions, text_positions
from phyai.models.cosmos3.state import ActionLayout, Layout, Modalities

FIXTURES = Path(__file__).parent / "fixtures"
BOUND = 5e-6
MODALITIES = ("video", "action", "sound")


@cache
def golden(variant):
    with safe_open(FIXTURES / f"transformer_{variant}.safetensors", framework="pt") as file:
        cases = json.loads(file.metadata()["cases"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return cases, tensors


@cache
def model(variant):
    return load_transformer(FIXTURES / f"transformer_{variant}", params_dtype=torch.float32)


def layout_of(case):
    action = case.get("action")
    return Layout(
        frames=case["frames"],
        height=case["height"],
        width=case["width"],
        clean_frames=tuple(case["clean_frames"]),
        fps=case["fps"],
        action=action and ActionLayout(**{**action, "clean_rows": tuple(action["clean_rows"])}),
        sound_frames=case.get("sound_frames", 0),
    )


def part(tensors, name, kind):
    return Modalities(*(tensors.get(f"{name}.{kind}.{modality}") for modality in MODALITIES))


CASES = [(variant, name) for variant in ("qwen", "edge") for name in golden(variant)[0]]


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_velocities_equal_diffusers(variant, name):
    cases, tensors = golden(variant)
    conditions = model(variant).prefill(tensors[f"{name}.ids"])
    (found,) = model(variant).velocities(
        part(tensors, name, "state"), cases[name]["timestep"], [conditions], layout_of(cases[name])
    )
    expected = part(tensors, name, "velocity")
    for modality in MODALITIES:
        ours, theirs = getattr(found, modality), getattr(expected, modality)
        if theirs is None:
            assert ours is None
            continue
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        scale = float(theirs.abs().max())
        error = float((ours - theirs).abs().max())
        assert error <= BOUND * max(scale, 1e-30), f"{modality}: {error / scale:.1e}"


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_positions_equal_diffusers(variant, name):
    cases, tensors = golden(variant)
    layout, ids = layout_of(cases[name]), tensors[f"{name}.ids"]
    media = media_positions(layout, ids.numel(), model(variant).config)
    grid = layout.grid(2)
    video, actions = grid[0] * grid[1] * grid[2], 0 if layout.action is None else layout.action.rows
    # diffusers has sound before actions.
    order = media.split((video, actions, layout.sound_frames))
    ours = torch.cat([text_positions(ids.numel()), order[0], order[2], order[1]])
    assert torch.equal(ours.T, tensors[f"{name}.positions"])


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_two_branches_in_one_batch_equal_each_alone(variant):
    cases, tensors = golden(variant)
    name = "state_row"
    layout, state = layout_of(cases[name]), part(tensors, name, "state")
    texts = [model(variant).prefill(tensors[f"{name}.ids"][:length]) for length in (13, 5)]
    together = model(variant).velocities(state, 624, texts, layout)
    for text, found in zip(texts, together, strict=True):
        (alone,) = model(variant).velocities(state, 624, [text], layout)
        for ours, theirs in ((found.video, alone.video), (found.action, alone.action)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together[0].video, together[1].video, atol=1e-3)
