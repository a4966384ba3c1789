# /// script
# requires-python = ">=3.12"
# dependencies = [
#     "accelerate==1.15.0",
#     "diffusers==0.42.1",
#     "safetensors==0.8.0",
#     "torch==2.14.1",
#     "transformers==5.24.0",
# ]
# ///
"""Write the golden runs of Cosmos3's whole pipeline with the one of diffusers.

The test suite does not need diffusers; run this apart:

    uv run --isolated --no-project scripts/build_cosmos3_pipeline_fixtures.py

``fixtures/pipeline/`` becomes a tiny repository with the tokenizer of the random checkpoints, and
``fixtures/pipeline.safetensors`` holds, for every mode, what the transformer was first called with
and the final latents and actions. Weights of the transformer are bf16 values, computed with in
fp32; those of the VAE are drawn from their names on both sides and not stored.
"""
# pyright: reportMissingImports=false

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _engine_module import ENGINE, cosmos3_module
from diffusers import (
    AutoencoderKLWan,
    Cosmos3AVAEAudioTokenizer,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    CosmosActionCondition,
    UniPCMultistepScheduler,
)
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

OUT = ENGINE / "tests/models/cosmos3/fixtures"
REPOSITORY = OUT / "pipeline"
DOMAIN, RAW_DIM, CHUNK = "bridge_orig_lerobot", 10, 4
SIZE = {"height": 48, "width": 64, "num_frames": 9, "fps": 24.0}

TRANSFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "latent_channel": 4,
    "latent_patch_size": 2,
    "patch_latent_dim": 16,
    "action_dim": 12,
    "action_gen": True,
    "num_embodiment_domains": 8,
    "sound_dim": 5,
    "sound_gen": True,
    "rope_axes_dim": [4, 2, 2],
}
VAE: dict[str, Any] = {
    "z_dim": 4,
    "base_dim": 8,
    "decoder_base_dim": 8,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [-0.2, 0.1, 0.3, -0.05],
    "latents_std": [0.8, 1.2, 0.6, 1.0],
}


def pictures(seed: int, *shape: int) -> np.ndarray:
    """Returns coarse uint8 pictures; the tests draw the same.

    Sides are multiples of 16 wherever diffusers would first resize them to such.
    """
    coarse = np.random.default_rng(seed).integers(0, 256, (*shape[:-2], 4, 4, 3), np.uint8)
    rows, columns = (np.arange(size) * 4 // size for size in shape[-2:])
    return coarse[..., rows, :, :][..., columns, :]


def fill(transformer: nn.Module) -> None:
    """Draws bf16 values of which none is neutral."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(transformer.named_parameters()):
        if "norm" in name:
            values = 0.5 + torch.rand(parameter.shape, generator=generator)
        else:
            scale = 0.08 if parameter.ndim > 1 else 0.5 if "modality" in name else 0.05
            values = scale * torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(values.bfloat16())


def tokenizer(folder: Path) -> tuple[PreTrainedTokenizerFast, int]:
    """Writes the tokenizer of the random checkpoints and opens it with transformers."""
    count = cosmos3_module("random_tokenizer").write_tokenizer(folder, "nano")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    opened = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=settings["eos_token"]
    )
    opened.chat_template = settings["chat_template"]
    return opened, count


def save(module: Any, name: str, *, weights: bool) -> None:
    """Writes config and bf16 weights as diffusers lays them out."""
    folder = REPOSITORY / name
    folder.mkdir(parents=True)
    kept = {k: v for k, v in dict(module.config).items() if not k.startswith("_use_default")}
    text = json.dumps(kept, indent=1, sort_keys=True, default=list) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    if weights:
        tensors = {k: v.bfloat16().contiguous() for k, v in module.state_dict().items()}
        save_file(tensors, folder / "diffusion_pytorch_model.safetensors")


def build() -> Cosmos3OmniPipeline:
    """Returns the tiny pipeline and writes its repository."""
    shutil.rmtree(REPOSITORY, ignore_errors=True)
    text, count = tokenizer(REPOSITORY / "text_tokenizer")
    transformer = Cosmos3OmniTransformer(**TRANSFORMER, vocab_size=count)
    vae = AutoencoderKLWan(**VAE)
    sound = Cosmos3AVAEAudioTokenizer(
        vocoder_input_dim=5, dec_dim=4, dec_c_mults=(1, 1, 1, 1, 1), encoder_enabled=False
    )
    fill(transformer)
    draw = cosmos3_module("hashed").hashed_weight
    for name, parameter in vae.named_parameters():
        parameter.data = draw(name, tuple(parameter.shape))
    save(transformer, "transformer", weights=True)
    save(vae, "vae", weights=False)
    pipeline = Cosmos3OmniPipeline(
        transformer=transformer.float().eval(),
        text_tokenizer=text,
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        sound_tokenizer=sound.float().eval(),
        enable_safety_checker=False,
        default_use_system_prompt=False,
        use_native_flow_schedule=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def action(mode: str, **given: Any) -> CosmosActionCondition:
    """Returns the condition of an action mode on the smallest tier."""
    return CosmosActionCondition(
        mode=mode, chunk_size=CHUNK, domain_name=DOMAIN, resolution_tier=256, **given
    )


def cases() -> dict[str, dict[str, Any]]:
    """Returns the arguments of every mode."""
    actions = np.random.default_rng(7).standard_normal((CHUNK, RAW_DIM)).astype(np.float32)
    large = Image.fromarray(pictures(2, 256, 448))
    small = Image.fromarray(pictures(1, 96, 144))
    clip = [Image.fromarray(frame) for frame in pictures(3, CHUNK + 1, 64, 48)]
    control = {"prompt": "pick up the red cup", "fps": 15.0}
    shown = {"prompt": "A red cup.", "negative_prompt": "blue", **SIZE}
    return {
        "policy": {**control, "action": action("policy", image=small)},
        "policy_large": {**control, "action": action("policy", image=large)},
        "forward_dynamics": {
            **control,
            "action": action(
                "forward_dynamics", image=small, raw_actions=torch.from_numpy(actions)
            ),
        },
        "inverse_dynamics": {**control, "action": action("inverse_dynamics", video=clip)},
        "text_to_image": {**shown, "num_frames": 1},
        "text_to_video": {**shown, "enable_sound": True, "use_system_prompt": True},
        "image_to_video": {**shown, "image": Image.fromarray(pictures(4, 60, 100))},
        "video_to_video": {
            **shown,
            "video": [Image.fromarray(frame) for frame in pictures(5, 5, 48, 64)],
            "condition_frame_indexes_vision": (0, 1),
        },
    }


def run(pipeline: Cosmos3OmniPipeline, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Runs 4 guided steps; returns the first call's inputs, the encoded pixels and the results."""
    calls: list[dict[str, Any]] = []
    pixels: list[Tensor] = []

    def record(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        calls.append(given)

    hook = pipeline.transformer.register_forward_pre_hook(record, with_kwargs=True)
    encode = pipeline.vae.encode
    pipeline.vae.encode = lambda x, *a, **k: (pixels.append(x), encode(x, *a, **k))[1]
    sounds: list[Tensor] = []
    decode_sound = pipeline.decode_sound
    pipeline.decode_sound = lambda x: (sounds.append(x), decode_sound(x))[1]
    result = pipeline(
        **arguments,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
    )
    hook.remove()
    del pipeline.vae.encode, pipeline.decode_sound
    found = {
        "ids": calls[0]["input_ids"],
        "negative_ids": calls[1]["input_ids"],
        "positions": calls[0]["position_ids"],
        "video": calls[0]["vision_tokens"][0],
        "final_video": result.video,
    }
    if result.action is not None:
        found["final_action"] = result.action[0]
    if sounds:
        found["final_sound"] = sounds[0]
    for name in ("action", "sound"):
        if calls[0][f"{name}_tokens"] is not None:
            found[name] = calls[0][f"{name}_tokens"][0]
    if pixels:
        found["pixels"] = (127.5 * (pixels[0] + 1)).mean((-1, -2))
        found["canvas"] = torch.tensor(pixels[0].shape[-2:])
    return {k: v.detach().clone().contiguous() for k, v in found.items()}


def main() -> None:
    """Writes the repository and the runs."""
    torch.set_num_threads(1)
    pipeline = build()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, arguments in cases().items():
            found = run(pipeline, arguments)
            tensors |= {f"{name}.{key}": value for key, value in found.items()}
    save_file(tensors, OUT / "pipeline.safetensors")
    for path in (*REPOSITORY.rglob("*.*"), OUT / "pipeline.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    main()
