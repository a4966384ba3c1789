"""The sampler against LeRobot's, on tiny random policies with fixed noise."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity

from phyai.models.pi05.savings import Savings

FP32_TOLERANCE = 1e-5
GPU_FP32_TOLERANCE = 1e-4  # other reduction orders, through up to ten steps
BF16_COSINE = 0.9995
BF16_ERROR_RATIO = 1.5

FAMILIES = ("pi05", "pi0")
STEPS = {
    "single": (1, 4, 10),
    "ragged": (1, 10),
    "last_camera_missing": (10,),
    "middle_camera_missing": (10,),
    "mixed_cameras": (10,),
}
CASES = [(group, steps) for group, counts in STEPS.items() for steps in counts]
SAVINGS = {
    "none": Savings.none(),
    "absent_cameras_masked": replace(Savings.all(), drop_absent_cameras=False),
    "prompt_not_packed": replace(Savings.all(), pack_prompt=False),
    "full_last_layer": replace(Savings.all(), lean_last_layer=False),
    "modulation_per_step": replace(Savings.all(), precompute_modulation=False),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("group", "steps"), CASES, ids=[f"{g}-{s}steps" for g, s in CASES])
def test_fp32_actions_equal_lerobots(golden, load_model, family, group, steps):
    case = golden(family)
    actions = load_model(family).sample_actions(
        case.inputs(group), noise=case.noise(group), num_steps=steps
    )
    assert actions.dtype == torch.float32
    torch.testing.assert_close(actions, case.actions(group, steps), atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("savings", SAVINGS)
def test_savings_change_only_rounding(golden, load_model, family, savings):
    case = golden(family)
    model = load_model(family, savings=SAVINGS[savings])
    for group in STEPS:
        actions = model.sample_actions(case.inputs(group), noise=case.noise(group))
        torch.testing.assert_close(actions, case.actions(group), atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("savings", ["all", *SAVINGS])
def test_absent_images_and_padding_are_never_seen(golden, load_model, family, savings):
    case = golden(family)
    model = load_model(family, savings=SAVINGS.get(savings))
    inputs = case.inputs("mixed_cameras")
    images, tokens = inputs.images.clone(), inputs.tokens.clone()
    images[~inputs.image_mask] = 123.0 if savings != "all" else torch.nan
    tokens[~inputs.token_mask] = 77
    garbled = replace(inputs, images=images, tokens=tokens)
    noise = case.noise("mixed_cameras")
    assert torch.equal(
        model.sample_actions(garbled, noise=noise), model.sample_actions(inputs, noise=noise)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_more_padding_does_not_matter(golden, load_model, family, pack):
    case = golden(family)
    model = load_model(family, savings=replace(Savings.all(), pack_prompt=pack))
    inputs = case.inputs("ragged")
    wider = replace(
        inputs,
        tokens=torch.nn.functional.pad(inputs.tokens, (0, 3)),
        token_mask=torch.nn.functional.pad(inputs.token_mask, (0, 3)),
    )
    actions = model.sample_actions(wider, noise=case.noise("ragged"))
    torch.testing.assert_close(actions, case.actions("ragged"), atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_batch_do_not_mix(golden, load_model, family):
    case, model = golden(family), load_model(family)
    inputs, noise = case.inputs("mixed_cameras"), case.noise("mixed_cameras")
    for row in range(len(noise)):
        one = slice(row, row + 1)
        alone = replace(
            inputs,
            images=inputs.images[one],
            image_mask=inputs.image_mask[one],
            tokens=inputs.tokens[one],
            token_mask=inputs.token_mask[one],
            state=inputs.state[one],
            prompts=inputs.prompts[one],
        )
        torch.testing.assert_close(
            model.sample_actions(alone, noise=noise[one]),
            case.actions("mixed_cameras")[one],
            atol=FP32_TOLERANCE,
            rtol=0,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_of_the_caller_is_not_changed(golden, load_model, family):
    case = golden(family)
    noise = case.noise("single").clone()
    load_model(family).sample_actions(case.inputs("single"), noise=noise, num_steps=1)
    assert torch.equal(noise, case.noise("single"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_actions_equal_lerobots_on_a_gpu(golden, load_model, family):
    case, model = golden(family), load_model(family, device="cuda")
    for group, steps in CASES:
        actions = model.sample_actions(
            case.inputs(group), noise=case.noise(group).cuda(), num_steps=steps
        )
        expected = case.actions(group, steps)
        torch.testing.assert_close(actions.cpu(), expected, atol=GPU_FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_close_to_fp32_as_lerobots_bf16(golden, load_model, family, device):
    case, model = golden(family), load_model(family, torch.bfloat16, device=device)
    ours, theirs = [], []
    for group, steps in CASES:
        exact = case.actions(group, steps)
        actions = model.sample_actions(
            case.inputs(group), noise=case.noise(group).to(device), num_steps=steps
        ).cpu()
        assert actions.dtype == torch.float32
        cosine = cosine_similarity(actions.flatten(1), exact.flatten(1))
        assert cosine.min() >= BF16_COSINE, f"{group}, {steps} steps: cosine {cosine.tolist()}"
        ours.append((actions - exact).flatten())
        theirs.append((case.actions(group, steps, bf16=True) - exact).flatten())
    our_error, their_error = torch.cat(ours), torch.cat(theirs)
    assert our_error.square().mean() <= (BF16_ERROR_RATIO**2) * their_error.square().mean()


@pytest.mark.parametrize(
    ("savings", "views", "rows"), [(Savings.all(), 6, 46), (Savings.none(), 9, 72)]
)
def test_dropping_and_packing_leave_rows_out(golden, load_model, savings, views, rows):
    # Two, one and three of three cameras with four tokens each; 9, 1 and 12 of 12 prompt slots.
    inputs = golden("pi05").inputs("mixed_cameras")
    _, layout = load_model("pi05", savings=savings).encode_prefix(inputs)
    assert (len(layout.views), layout.total) == (views, rows)


@pytest.mark.parametrize(("savings", "skipped"), [(Savings.all(), 1), (Savings.none(), 0)])
def test_lean_last_layer_runs_and_keeps_no_mlp(golden, load_model, savings, skipped):
    model = load_model("pi05", savings=savings)
    seen = []
    handles = [
        layer.mlp.register_forward_hook(lambda *_: seen.append(1))
        for layer in model.language.layers
    ]
    model.encode_prefix(golden("pi05").inputs("single"))
    for handle in handles:
        handle.remove()
    assert len(seen) == model.config.language.layers - skipped
    last = model.config.language.layers - 1
    kept = {
        m.prefix for m in model.language.modules() if f"layers.{last}." in getattr(m, "prefix", "")
    }
    assert any(name.endswith("qkv_proj") for name in kept)
    assert any(name.endswith("down_proj") for name in kept) == (not skipped)


@pytest.mark.parametrize(("savings", "calls"), [(Savings.all(), 0), (Savings.none(), 3)])
def test_modulation_is_computed_once_for_a_step_count(golden, load_model, savings, calls):
    case, model = golden("pi05"), load_model("pi05", savings=savings)
    arguments = {"noise": case.noise("single"), "num_steps": 3}
    first = model.sample_actions(case.inputs("single"), **arguments)
    seen = []
    handle = model.time.register_forward_hook(lambda *_: seen.append(1))
    again = model.sample_actions(case.inputs("single"), **arguments)
    handle.remove()
    assert len(seen) == calls
    assert torch.equal(first, again)
