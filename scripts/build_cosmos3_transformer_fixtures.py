# /// script
# requires-python = "==3.13.*"
# dependencies = [
#     "accelerate==1.15.0",
#     "diffusers==0.42.1",
#     "safetensors==0.8.0",
#     "torch==2.14.1",
#     "transformers==5.24.0",
# ]
# ///
"""Write the golden fixtures of Cosmos3's transformer: tiny checkpoints, inputs and velocities.

    uv run --isolated --no-project --python 3.13 scripts/build_cosmos3_transformer_fixtures.py

For each variant ``transformer_<variant>/`` is what diffusers saves, in shards, and
``transformer_<variant>.safetensors`` holds inputs and fp32 results of its
``Cosmos3OmniTransformer`` on them. Weights are bf16 values, so that both are exact and small.
"""
# pyright: reportMissingImports=false

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
    get_3d_mrope_ids_text_tokens,
    get_3d_mrope_ids_vae_tokens,
)
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "packages/phyai-engine/tests/models/cosmos3/fixtures"
MARGIN = 15000
DOMAIN = 2

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "latent_channel": 4,
    "latent_patch_size": 2,
    "patch_latent_dim": 16,
    "action_dim": 8,
    "action_gen": True,
    "num_embodiment_domains": 4,
    "rope_theta": 5e6,
    "rope_axes_dim": [4, 2, 2],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen": {**COMMON, "sound_dim": 5, "sound_gen": True},
    "edge": {
        **COMMON,
        "hidden_act": "relu2",
        "qk_norm_for_text": False,
        "rms_norm_eps": 1e-5,
        "use_und_k_norm_for_gen": True,
    },
}

VIDEO: dict[str, Any] = {"frames": 5, "height": 5, "width": 6, "fps": 15.0}
START_1 = {"rows": 16, "start": 1, "clean_rows": [], "raw_dim": 8, "domain_id": DOMAIN}
STATE = {"rows": 17, "start": 0, "clean_rows": [0], "raw_dim": 8, "domain_id": DOMAIN}
CASES: dict[str, dict[str, Any]] = {
    "start_1": {**VIDEO, "clean_frames": [0], "action": START_1, "timestep": 833},
    "state_row": {**VIDEO, "clean_frames": [0], "action": STATE, "timestep": 833},
    "start_1_sound": {
        **VIDEO, "clean_frames": [0], "action": START_1, "sound_frames": 11, "timestep": 833,
    },
    "state_row_sound": {
        **VIDEO, "clean_frames": [0], "action": STATE, "sound_frames": 11, "timestep": 833,
    },
    "image": {**VIDEO, "frames": 1, "height": 7, "clean_frames": [], "timestep": 999},
    "video_sound": {
        **VIDEO, "fps": 24.0, "clean_frames": [0, 1], "sound_frames": 3, "timestep": 128,
    },
    "forward_dynamics": {
        **VIDEO, "clean_frames": [0], "timestep": 624,
        "action": {**START_1, "clean_rows": [*range(16)]},
    },
    "inverse_dynamics": {
        **VIDEO, "clean_frames": [*range(5)], "action": START_1, "timestep": 937,
    },
}  # fmt: skip
"""Layouts by name; cases with sound belong to the variant that has it."""


def build(config: dict[str, Any], generator: torch.Generator) -> Cosmos3OmniTransformer:
    """Returns a model of bf16 values in fp32, none of them neutral."""
    model = Cosmos3OmniTransformer(**config)
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if "norm" in name:
            values = 0.5 + torch.rand(shape, generator=generator)
        else:
            scale = 0.5 if "modality_embed" in name else 0.05 if "bias" in name else 0.08
            values = scale * torch.randn(shape, generator=generator)
        parameter.data = values.bfloat16().float()
    return model.eval()


def positions(case: dict[str, Any], text: int) -> Tensor:
    """Returns [3, tokens] of text, video, sound and action rows, as diffusers' pipeline makes."""
    offset = text + MARGIN
    grid = case["frames"], -(-case["height"] // 2), -(-case["width"] // 2)
    parts = [get_3d_mrope_ids_text_tokens(text, 0, use_float_positions=True)[0]]
    common: dict[str, Any] = {"temporal_offset": offset, "base_fps": 24.0}
    parts.append(get_3d_mrope_ids_vae_tokens(*grid, fps=case["fps"], **common)[0])
    if case.get("sound_frames"):
        compression = {"temporal_compression_factor": 1}
        sound = case["sound_frames"], 1, 1
        parts.append(get_3d_mrope_ids_vae_tokens(*sound, fps=25.0, **compression, **common)[0])
    if "action" in case:
        rows = case["action"]["rows"], 1, 1
        parts.append(
            get_3d_mrope_ids_vae_tokens(
                *rows,
                fps=case["fps"],
                temporal_compression_factor=1,
                base_temporal_compression_factor=4,
                start_frame_offset=case["action"]["start"],
                **common,
            )[0]
        )
    return torch.cat([part.float() for part in parts], dim=1)


def spread(count: int, each: int, clean: list[int], first: int, timestep: int) -> tuple[Any, ...]:
    """Returns sequence indices, noisy ones, their timesteps and the noisy frames."""
    frames = [frame for frame in range(count) if frame not in clean]
    index = torch.arange(first, first + count * each)
    noisy = index.view(count, each)[frames].flatten()
    return index, noisy, torch.full(noisy.shape, float(timestep)), [torch.tensor(frames).long()]


def arguments(case: dict[str, Any], ids: Tensor, state: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the packed arguments of diffusers' forward."""
    text, timestep = ids.numel(), case["timestep"]
    grid = case["frames"], -(-case["height"] // 2), -(-case["width"] // 2)
    place = positions(case, text)
    parts = {"vision": (state["video"][None], grid, case["clean_frames"])}
    if case.get("sound_frames"):
        parts["sound"] = state["sound"], (case["sound_frames"], 1, 1), []
    if "action" in case:
        action = case["action"]
        parts["action"] = state["action"], (action["rows"], 1, 1), action["clean_rows"]
    found: dict[str, Any] = {}
    first = text
    for name, (tokens, shape, clean) in parts.items():
        each = shape[1] * shape[2]
        index, noisy, times, frames = spread(shape[0], each, clean, first, timestep)
        found |= {
            f"{name}_tokens": [tokens],
            f"{name}_token_shapes": [shape],
            f"{name}_sequence_indexes": index,
            f"{name}_mse_loss_indexes": noisy,
            f"{name}_timesteps": times,
            f"{name}_noisy_frame_indexes": frames,
        }
        first += index.numel()
    if "action" in case:
        found["action_domain_ids"] = [torch.tensor(case["action"]["domain_id"])]
    return {
        "input_ids": ids,
        "text_indexes": torch.arange(text),
        "position_ids": place,
        "und_len": text,
        "sequence_length": first,
        **found,
    }


@torch.no_grad()
def run(
    model: Cosmos3OmniTransformer, case: dict[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns inputs and velocities of one case."""
    ids = torch.randint(0, 64, (13,), generator=generator)
    shape = 4, case["frames"], case["height"], case["width"]
    state = {"video": torch.randn(shape, generator=generator)}
    if "action" in case:
        state["action"] = torch.randn(case["action"]["rows"], 8, generator=generator)
    if case.get("sound_frames"):
        state["sound"] = torch.randn(5, case["sound_frames"], generator=generator)
    packed = arguments(case, ids, state)
    video, sound, action = model(**packed, return_dict=False)
    results = {"ids": ids, "positions": packed["position_ids"].contiguous()}
    results |= {f"state.{name}": value for name, value in state.items()}
    results["velocity.video"] = video[0].reshape(shape)
    if action is not None:
        results["velocity.action"] = action[0].reshape(state["action"].shape)
    if sound is not None:
        results["velocity.sound"] = sound[0].reshape(state["sound"].shape)
    return {name: value.contiguous() for name, value in results.items()}


def write(variant: str, folder: Path) -> None:
    """Writes the checkpoint and the cases of one variant."""
    generator = torch.Generator().manual_seed(len(variant) + 100 * (variant == "edge"))
    config = VARIANTS[variant]
    model = build(config, generator)
    tensors: dict[str, Tensor] = {}
    cases = {
        name: case
        for name, case in CASES.items()
        if config.get("sound_gen") or not case.get("sound_frames")
    }
    for name, case in cases.items():
        results = run(model, case, generator)
        tensors |= {f"{name}.{key}": value for key, value in results.items()}
    metadata = {"cases": json.dumps(cases, sort_keys=True)}
    save_file(tensors, folder / f"transformer_{variant}.safetensors", metadata=metadata)
    target = folder / f"transformer_{variant}"
    shutil.rmtree(target, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(target, max_shard_size="200KB")


def main() -> None:
    """Writes all fixtures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    for variant in VARIANTS:
        write(variant, folder)


if __name__ == "__main__":
    main()
