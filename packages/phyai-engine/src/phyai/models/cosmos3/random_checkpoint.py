"""A Cosmos3 repository of random weights, by default a tiny one, in the layout of diffusers.

    python -m phyai.models.cosmos3.random_checkpoint FOLDER --variant edge

Its videos and actions mean nothing; its files, names, shapes and dtypes are those of the published
checkpoints, so that everything that reads one can be tried without one.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from phyai.models.cosmos3.random_parts import sound_tensors, vae_tensors
from phyai.models.cosmos3.random_tokenizer import write_tokenizer

Variant = Literal["nano", "edge"]
VARIANTS: tuple[Variant, ...] = ("nano", "edge")

TINY_COMMON: dict[str, Any] = {
    "_class_name": "Cosmos3OmniTransformer",
    "action_dim": 32,
    "action_gen": True,
    "attention_bias": False,
    "base_fps": 24,
    "enable_fps_modulation": True,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "joint_attn_implementation": "two_way",
    "latent_channel": 4,
    "latent_patch_size": 2,
    "num_attention_heads": 4,
    "num_embodiment_domains": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "patch_latent_dim": 16,
    "position_embedding_type": "unified_3d_mrope",
    "qk_norm_for_diffusion": True,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [8, 4, 4]},
    "timestep_scale": 0.001,
    "unified_3d_mrope_reset_spatial_ids": True,
    "unified_3d_mrope_temporal_modality_margin": 15000,
    "video_temporal_causal": False,
}
TINY_TRANSFORMER: dict[Variant, dict[str, Any]] = {
    "nano": {
        **TINY_COMMON,
        "backbone_type": "qwen3_vl_text",
        "hidden_act": "silu",
        "model_type": "qwen3_vl_text",
        "qk_norm_for_text": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "sound_dim": 8,
        "sound_gen": True,
        "sound_latent_fps": 25,
        "use_und_k_norm_for_gen": False,
    },
    "edge": {
        **TINY_COMMON,
        "backbone_type": "cosmos3_edge_nemotron_dense",
        "hidden_act": "relu2",
        "model_type": "cosmos3_edge_nemotron_dense",
        "qk_norm_for_text": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000000,
        "sound_dim": None,
        "sound_gen": False,
        "sound_latent_fps": None,
        "use_und_k_norm_for_gen": True,
    },
}
"""The tiny models, but for ``vocab_size``, which the tokenizer decides.

The widths are multiples of 128, so that every kernel policy can store the weights.
"""

TINY_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "attn_scales": [],
    "base_dim": 8,
    "decoder_base_dim": 8,
    "dim_mult": [1, 2, 4, 4],
    "dropout": 0.0,
    "in_channels": 12,
    "is_residual": True,
    "latents_mean": [-0.2, 0.1, 0.3, -0.05],
    "latents_std": [0.8, 1.2, 0.6, 1.0],
    "num_res_blocks": 2,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "temperal_downsample": [False, True, True],
    "z_dim": 4,
}
SCHEDULER: dict[Variant, dict[str, Any]] = {
    "nano": {
        "_class_name": "UniPCMultistepScheduler",
        "flow_shift": 1.0,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "sigma_max": 200.0,
        "sigma_min": 0.147,
        "solver_order": 2,
        "use_flow_sigmas": True,
        "use_karras_sigmas": True,
    },
    "edge": {
        "_class_name": "UniPCMultistepScheduler",
        "flow_shift": 5.0,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "solver_order": 2,
        "use_flow_sigmas": True,
        "use_karras_sigmas": False,
    },
}
POLICY: dict[str, Any] = {
    "action_chunk_size": 32,
    "conditioning_fps": 15,
    "domain_name": "droid_lerobot",
}


def transformer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of ``transformer/`` by its stored name."""
    width, mlp = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    patch, action, domains = (
        config[name] for name in ("patch_latent_dim", "action_dim", "num_embodiment_domains")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], width),
        "lm_head.weight": (config["vocab_size"], width),
        "norm.weight": (width,),
        "norm_moe_gen.weight": (width,),
        **_linear("proj_in", width, patch),
        **_linear("proj_out", patch, width),
        **_linear("time_embedder.linear_1", width, 256),
        **_linear("time_embedder.linear_2", width, width),
    }
    if config["action_gen"]:
        shapes["action_proj_in.fc.weight"] = (domains, action * width)
        shapes["action_proj_in.bias.weight"] = (domains, width)
        shapes["action_proj_out.fc.weight"] = (domains, width * action)
        shapes["action_proj_out.bias.weight"] = (domains, action)
        shapes["action_modality_embed"] = (width,)
    if config["sound_gen"]:
        shapes |= _linear("audio_proj_in", width, config["sound_dim"])
        shapes |= _linear("audio_proj_out", config["sound_dim"], width)
        shapes["audio_modality_embed"] = (width,)
    projections = {"q": queries, "k": keys, "v": keys}
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        for tower in ("", "_moe_gen"):
            shapes[f"{layer}.input_layernorm{tower}.weight"] = (width,)
            shapes[f"{layer}.post_attention_layernorm{tower}.weight"] = (width,)
            if config["hidden_act"] == "silu":
                shapes[f"{layer}.mlp{tower}.gate_proj.weight"] = (mlp, width)
            shapes[f"{layer}.mlp{tower}.up_proj.weight"] = (mlp, width)
            shapes[f"{layer}.mlp{tower}.down_proj.weight"] = (width, mlp)
        attention = f"{layer}.self_attn"
        for name, size in projections.items():
            shapes[f"{attention}.to_{name}.weight"] = (size, width)
            shapes[f"{attention}.add_{name}_proj.weight"] = (size, width)
        for name in ("to_out", "to_add_out"):
            shapes[f"{attention}.{name}.weight"] = (width, queries)
        norms = ["norm_added_q", "norm_added_k"]
        norms += ["norm_q", "norm_k"] if config["qk_norm_for_text"] else []
        norms += ["k_norm_und_for_gen"] if config["use_und_k_norm_for_gen"] else []
        shapes |= {f"{attention}.{name}.weight": (head,) for name in norms}
    return shapes


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def transformer_tensors(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Returns random fp32 weights of ``transformer/`` that hide nothing.

    Norms are uniform in 0.5 to 1.5, matrices normal with standard deviation 0.08, embeddings of
    the modalities with 0.5, biases with 0.05: no tensor is at its neutral value.
    """

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return 0.5 + torch.rand(shape, generator=generator)
        values = torch.randn(shape, generator=generator)
        if name.endswith("modality_embed"):
            return 0.5 * values
        return (0.05 if "bias" in name else 0.08) * values

    return {name: draw(name, shape) for name, shape in transformer_shapes(config).items()}


def write_random_checkpoint(
    folder: Path | str,
    variant: Variant = "nano",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    policy: Mapping[str, Any] | None = POLICY,
    **overrides: Any,
) -> Path:
    """Writes a tiny repository.

    Args:
        folder: is made when it does not exist.
        variant: ``nano``: SwiGLU, sound, Qwen's special tokens; ``edge``: squared ReLU, its own
            special tokens and norms, no sound.
        seed: of the weights.
        dtype: of the stored weights of the transformer; those of VAE and sound are fp32.
        policy: what ``checkpoint.json`` says about the robot policy; None writes none. Smaller
            chunks answer sooner.
        **overrides: entries of ``transformer/config.json``.

    Returns:
        The folder.
    """
    folder = Path(folder)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = write_tokenizer(folder / "text_tokenizer", variant)
    config = {"vocab_size": vocabulary, **TINY_TRANSFORMER[variant], **overrides}
    weights = transformer_tensors(config, generator)
    _write_part(folder / "transformer", config, {k: v.to(dtype) for k, v in weights.items()})
    vae = {**TINY_VAE, "z_dim": config["latent_channel"]}
    _write_part(folder / "vae", vae, vae_tensors(vae, generator))
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER[variant])
    parts = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "Cosmos3OmniTransformer"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if config["sound_gen"]:
        sound, tensors = sound_tensors(config["sound_dim"], generator)
        _write_part(folder / "sound_tokenizer", sound, tensors)
        parts["sound_tokenizer"] = ["diffusers", "Cosmos3AVAEAudioTokenizer"]
    edge = variant == "edge"
    _write_json(
        folder / "model_index.json",
        {
            "_class_name": "Cosmos3OmniPipeline",
            "default_use_system_prompt": not edge,
            "use_native_flow_schedule": edge,
            **parts,
        },
    )
    if policy is not None:
        _write_json(folder / "checkpoint.json", {"policy": dict(policy)})
    return folder


def _write_part(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    _write_json(folder / "config.json", config)
    save_file(dict(tensors), folder / "diffusion_pytorch_model.safetensors")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Writes what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m phyai.models.cosmos3.random_checkpoint",
        description="Write a tiny Cosmos3 repository of random weights.",
    )
    parser.add_argument("folder", type=Path, help="is made when it does not exist")
    parser.add_argument("--variant", choices=VARIANTS, default="nano")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    write_random_checkpoint(args.folder, args.variant, seed=args.seed)


if __name__ == "__main__":
    main()
