# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "lerobot[pi]==0.6.1",
#     "protobuf==7.36.2",
#     "sentencepiece==0.2.3",
#     "tokenizers==0.22.2",
#     "torch==2.11.0",
#     "torchvision==0.26.0",
#     "transformers==5.5.4",
# ]
# ///
"""Write the golden fixtures of π0.5 and π0: tiny LeRobot checkpoints, inputs and outputs.

LeRobot and this repository need different versions of the same libraries, so run it apart:

    uv run --isolated --no-project --python 3.12 scripts/build_golden_pi05.py

Everything in a fixture folder but ``phyai_config.json`` and the golden ``*.safetensors`` is what
LeRobot and transformers themselves save. Nothing is downloaded at run time.
"""
# pyright: reportMissingImports=false

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from golden_policies import GROUPS, SIZES, build_policy, draw_inputs
from golden_processing import write_normalization_modes, write_processing
from lerobot_tiny import SIDECAR_NAME
from safetensors.torch import save_file
from tiny_tokenizer import write_tokenizer
from torch import Tensor

FIXTURES = Path(__file__).resolve().parent.parent / "packages/phyai-engine/tests/fixtures"
STAGE_GROUP = "mixed_cameras"
FULL_TIME_WIDTH = 1024


def model_images(inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return one float32 ``[B, 3, H, W]`` in [-1, 1] per camera; absent images are black."""
    pixels = inputs["images"].float() / 255.0 * 2.0 - 1.0
    pixels[~inputs["image_mask"]] = -1.0
    return list(pixels.unbind(1))


def sample(policy: Any, inputs: dict[str, Tensor], num_steps: int) -> Tensor:
    """Return LeRobot's actions ``[B, T, max_action_dim]`` of all columns."""
    arguments = [
        model_images(inputs),
        list(inputs["image_mask"].unbind(1)),
        inputs["tokens"],
        inputs["token_mask"],
    ]
    if policy.name == "pi0":
        arguments.append(inputs["state"])
    return policy.model.sample_actions(*arguments, noise=inputs["noise"], num_steps=num_steps)


@torch.no_grad()
def stages(policy: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return intermediate values of one inference, to tell where a difference begins.

    ``image_features`` ``[B, V, N, width]`` after the projector, ``prompt_embeddings``
    ``[B, L, width]``, ``prefix_key_<i>`` (after RoPE) and ``prefix_value_<i>``
    ``[B, 1, P, head_dim]`` of every language layer, ``time_embedding`` at t = 1, 0.9, 0.1 of the
    expert's width and of 1024, and ``first_velocity`` ``[B, T, max_action_dim]`` at t = 1.
    """
    from lerobot.policies.common.vla_utils import (
        create_sinusoidal_pos_embedding,
        make_att_2d_masks,
        prepare_attention_masks_4d,
    )

    model, trunk = policy.model, policy.model.paligemma_with_expert
    images, masks = model_images(inputs), list(inputs["image_mask"].unbind(1))
    embedded, valid, blocks = model.embed_prefix(
        images, masks, inputs["tokens"], inputs["token_mask"]
    )
    trunk.paligemma.model.language_model.config._attn_implementation = "eager"
    _, cache = trunk.forward(
        attention_mask=prepare_attention_masks_4d(make_att_2d_masks(valid, blocks)),
        position_ids=torch.cumsum(valid, dim=1) - 1,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    times = torch.tensor([1.0, 0.9, 0.1])
    found = {
        "image_features": torch.stack([trunk.embed_image(image) for image in images], dim=1),
        "prompt_embeddings": trunk.embed_language_tokens(inputs["tokens"]),
    }
    for index, (keys, values, _) in enumerate(cache):
        found[f"prefix_key_{index}"] = keys.clone()
        found[f"prefix_value_{index}"] = values.clone()
    for width in (model.action_in_proj.out_features, FULL_TIME_WIDTH):
        embedding = create_sinusoidal_pos_embedding(
            times, width, policy.config.min_period, policy.config.max_period, times.device
        )
        found[f"time_embedding_{width}"] = embedding.float()
    state = [inputs["state"]] if policy.name == "pi0" else []
    start = torch.ones(len(inputs["tokens"]))
    found["first_velocity"] = model.denoise_step(*state, valid, cache, inputs["noise"], start)
    return found


def golden_tensors(family: str, policy: Any) -> dict[str, Tensor]:
    """Return inputs, float32 and bfloat16 actions of every group, and the stages of one."""
    rounded = build_policy(family, "bfloat16")
    generator = torch.Generator().manual_seed(20)
    tensors: dict[str, Tensor] = {}
    for name, group in GROUPS.items():
        inputs = draw_inputs(group, generator)
        tensors |= {f"{name}.{key}": value for key, value in inputs.items()}
        for steps in group.num_steps:
            tensors[f"{name}.actions_{steps}"] = sample(policy, inputs, steps)
            tensors[f"{name}.actions_{steps}_bf16"] = sample(rounded, inputs, steps)
        if name == STAGE_GROUP:
            found = stages(policy, inputs)
            tensors |= {f"{name}.stage.{key}": value for key, value in found.items()}
    return {key: value.contiguous() for key, value in tensors.items()}


def write_family(family: str, directory: Path) -> None:
    """Write the checkpoint, the model cases and the processing cases of one family."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    policy = build_policy(family)
    policy.save_pretrained(directory)
    sidecar = {"vision_num_heads": SIZES[family].vision.num_heads}
    (directory / SIDECAR_NAME).write_text(json.dumps(sidecar) + "\n")
    write_tokenizer(directory)
    write_processing(policy, directory)
    save_file(golden_tensors(family, policy), directory / "cases.safetensors")


def main() -> None:
    """Rebuild every fixture below the output folder."""
    parser = argparse.ArgumentParser(description="Rebuild the golden fixtures of π0.5 and π0.")
    parser.add_argument("--output", type=Path, default=FIXTURES, help="folder of the fixtures")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    for family in SIZES:
        write_family(family, output / f"{family}_tiny")
    write_normalization_modes(output)
    for path in sorted(output.rglob("*")):
        if path.is_file():
            path.chmod(0o644)
            print(f"{path.stat().st_size:9d} {path.relative_to(output)}")


if __name__ == "__main__":
    main()
