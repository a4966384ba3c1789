# /// script
# requires-python = ">=3.12"
# dependencies = ["jax>=0.5", "ml_dtypes", "numpy>=2", "orbax-checkpoint>=0.11", "safetensors"]
# ///
"""Write openpi's JAX layout of the tiny checkpoints with Orbax itself.

Orbax needs JAX, so run it apart:

    uv run --isolated --no-project --python 3.12 scripts/build_orbax_fixtures.py

The arrays are those of the PyTorch fixtures, with the axes that openpi's JAX models have.
"""
# pyright: reportMissingImports=false

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors import safe_open

TESTS = Path(__file__).resolve().parent.parent / "packages/phyai-engine/tests"
FIXTURES, ARRAYS = TESTS / "fixtures", TESTS / "models/pi05/orbax"
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"


class Source:
    """Tensors of a PyTorch fixture as fp32 arrays."""

    def __init__(self, checkpoint: Path) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        with safe_open(checkpoint / "model.safetensors", framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self.arrays[name.removeprefix("model.")] = file.get_tensor(name).astype(np.float32)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def layers(self, body: str, name: str) -> np.ndarray:
        """Return a tensor of all layers of a body, stacked."""
        found = []
        while f"{body}.layers.{len(found)}.{name}" in self.arrays:
            found.append(self[f"{body}.layers.{len(found)}.{name}"])
        return np.stack(found)


def dense(source: Source, name: str) -> dict[str, np.ndarray]:
    """Return a linear layer with its kernel transposed."""
    return {"kernel": source[f"{name}.weight"].T, "bias": source[f"{name}.bias"]}


def vision(source: Source, heads: int) -> dict[str, Any]:
    """Return the vision tower and the projector behind it."""
    body = f"{VISION}.encoder"

    def layers(name: str) -> np.ndarray:
        return source.layers(body, name)

    def head_split(name: str) -> dict[str, np.ndarray]:
        weight, bias = layers(f"self_attn.{name}.weight"), layers(f"self_attn.{name}.bias")
        count, width, _ = weight.shape
        kernel = weight.transpose(0, 2, 1).reshape(count, -1, heads, width // heads)
        return {"kernel": kernel, "bias": bias.reshape(count, heads, width // heads)}

    out = layers("self_attn.out_proj.weight")
    count, width, _ = out.shape
    attention = {name: head_split(f"{name[0]}_proj") for name in ("query", "key", "value")}
    attention["out"] = {
        "kernel": out.transpose(0, 2, 1).reshape(count, heads, width // heads, width),
        "bias": layers("self_attn.out_proj.bias"),
    }
    patches = f"{VISION}.embeddings.patch_embedding"
    block: dict[str, Any] = {
        f"LayerNorm_{n}": {
            "scale": layers(f"layer_norm{n + 1}.weight"),
            "bias": layers(f"layer_norm{n + 1}.bias"),
        }
        for n in range(2)
    }
    block["MultiHeadDotProductAttention_0"] = attention
    block["MlpBlock_0"] = {
        f"Dense_{n}": {
            "kernel": layers(f"mlp.fc{n + 1}.weight").transpose(0, 2, 1),
            "bias": layers(f"mlp.fc{n + 1}.bias"),
        }
        for n in range(2)
    }
    return {
        "embedding": {
            "kernel": source[f"{patches}.weight"].transpose(2, 3, 1, 0),
            "bias": source[f"{patches}.bias"],
        },
        "pos_embedding": source[f"{VISION}.embeddings.position_embedding.weight"][None],
        "Transformer": {
            "encoderblock": block,
            "encoder_norm": {
                "scale": source[f"{VISION}.post_layernorm.weight"],
                "bias": source[f"{VISION}.post_layernorm.bias"],
            },
        },
        "head": dense(source, PROJECTOR),
    }


def body(source: Source, prefix: str, ending: str, head_dim: int) -> dict[str, Any]:
    """Return attention, MLP and norms of one Gemma body, named with its ending."""

    def layers(name: str) -> np.ndarray:
        return source.layers(prefix, name)

    def by_head(name: str) -> np.ndarray:
        weight = layers(f"self_attn.{name}_proj.weight")
        return weight.reshape(weight.shape[0], -1, head_dim, weight.shape[2]).transpose(0, 1, 3, 2)

    out = layers("self_attn.o_proj.weight").transpose(0, 2, 1)
    gates = [layers(f"mlp.{name}_proj.weight").transpose(0, 2, 1) for name in ("gate", "up")]
    found: dict[str, Any] = {
        "attn": {
            f"q_einsum{ending}": {"w": by_head("q")},
            f"kv_einsum{ending}": {"w": np.stack([by_head("k"), by_head("v")], axis=1)},
            f"attn_vec_einsum{ending}": {
                "w": out.reshape(out.shape[0], -1, head_dim, out.shape[2])
            },
        },
        f"mlp{ending}": {
            "gating_einsum": np.stack(gates, axis=1),
            "linear": layers("mlp.down_proj.weight").transpose(0, 2, 1),
        },
    }
    names = {
        "pre_attention_norm": "input_layernorm",
        "pre_ffw_norm": "post_attention_layernorm",
    }
    for name, stored in names.items():
        if f"{prefix}.layers.0.{stored}.weight" in source.arrays:
            found[f"{name}{ending}"] = {"scale": layers(f"{stored}.weight")}
        else:
            kernel = layers(f"{stored}.dense.weight").transpose(0, 2, 1)
            found[f"{name}{ending}"] = {
                "Dense_0": {"kernel": kernel, "bias": layers(f"{stored}.dense.bias")}
            }
    return found


def final_norm(source: Source, prefix: str) -> dict[str, Any]:
    """Return the norm behind a body, plain or adaptive."""
    if f"{prefix}.norm.weight" in source.arrays:
        return {"scale": source[f"{prefix}.norm.weight"]}
    return {"Dense_0": dense(source, f"{prefix}.norm.dense")}


def parameters(source: Source, vision_heads: int) -> dict[str, Any]:
    """Return the tree of parameters."""
    # There is one key head.
    head_dim = len(source[f"{LANGUAGE}.layers.0.self_attn.k_proj.weight"])
    first = body(source, LANGUAGE, "", head_dim)
    second = body(source, EXPERT, "_1", head_dim)
    attention = first.pop("attn") | second.pop("attn")
    heads = (
        "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out", "state_proj",
        "action_time_mlp_in", "action_time_mlp_out",
    )  # fmt: skip
    return {
        "PaliGemma": {
            "img": vision(source, vision_heads),
            "llm": {
                "embedder": {"input_embedding": source[f"{LANGUAGE}.embed_tokens.weight"]},
                "layers": {"attn": attention, **first, **second},
                "final_norm": final_norm(source, LANGUAGE),
                "final_norm_1": final_norm(source, EXPERT),
            },
        },
        **{name: dense(source, name) for name in heads if f"{name}.weight" in source.arrays},
    }


def with_values(tree: Any) -> Any:
    """Return the tree that Flax's NNX exports, in bf16: each leaf under a key named value."""
    if isinstance(tree, dict):
        return {name: with_values(part) for name, part in tree.items()}
    return {"value": tree.astype(ml_dtypes.bfloat16)}


def main() -> None:
    """Write the fixtures of both families."""
    for family in ("pi05", "pi0"):
        checkpoint = FIXTURES / f"{family}_tiny"
        sidecar = json.loads((checkpoint / "phyai_config.json").read_text())
        tree = parameters(Source(checkpoint), sidecar["vision_num_heads"])
        if family == "pi05":
            tree = with_values(tree)
        target = ARRAYS / family / "params"
        shutil.rmtree(target.parent, ignore_errors=True)
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(target, {"params": tree})
        # It names the folder it was written to.
        (target / "commit_success.txt").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
