"""What the tools that write quantized fixtures share: the tiny model, its data and the files.

Runs in the environment of the tool that calls it, next to torch, transformers and safetensors.
"""
# pyright: reportMissingImports=false

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).resolve().parent.parent / "packages/phyai-quant/tests/fixtures"
ROW_STEP = 23
"""Every 23rd row of a weight is stored, for messages; the digest covers all of them."""
VOCABULARY = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tiny Llama, with fewer key and value heads than query heads."""

    hidden: int = 64
    intermediate: int = 48
    head_dim: int = 16
    heads: int = 2
    layers: int = 2


def output_root(description: str, tool: str) -> Path:
    """Parses ``--output`` and returns the folder of the tool's fixtures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=FIXTURES)
    return parser.parse_args().output / tool


def build_llama(folder: Path, sizes: Sizes) -> Any:
    """Saves a seeded tiny Llama in bf16 and returns it as its library loads it.

    One row of the first layer's queries is zero, one is large and one is the smallest normal bf16:
    scales that a quantizer must bear.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=1,
        head_dim=sizes.head_dim,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
                weight[:, 5] *= 8
        queries = model.model.layers[0].self_attn.q_proj.weight
        queries[3] = 0
        queries[7] *= 100
        queries[9] = torch.finfo(torch.bfloat16).tiny
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def calibration_tokens() -> torch.Tensor:
    """Returns int64 tokens ``[4, 16]`` for calibration."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCABULARY, (4, 16), generator=generator)


def probe(columns: int, *, grid: bool = False) -> torch.Tensor:
    """Returns an fp32 activation ``[3, columns]`` with a zero row and a large row.

    Values on a ``grid`` of 1/16 meet the ties of formats whose scales are powers of two; the others
    stay away from ties, where the last bit of a scale decides.
    """
    steps = torch.arange(3 * columns).reshape(3, columns)
    x = (
        (steps * 37 % 101 - 50).float() / 16
        if grid
        else (steps * 7919 % 9973 - 4986).float() / 1600
    )
    x[1] = 0
    x[2] *= 256
    return x


def is_probed(layer: str) -> bool:
    """Tells whether the fixture holds the layer's activation: those of the first decoder layer."""
    return ".layers.0." in layer


def digest(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 of the tensor's fp32 values, with zeros of one sign."""
    values = tensor.detach().float().contiguous() + 0.0
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def write_expected(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    activations: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes ``expected.safetensors``: what the tool itself makes of its checkpoint.

    Args:
        folder: The fixture.
        weights: Dequantized weight ``[N, K]`` by layer, in the dtype of the tool's arithmetic.
            Every `ROW_STEP`-th row is stored as ``<layer>.weight``, the digest of all rows in the
            metadata under the same name, its shape beside.
        activations: What the tool computes with instead of `probe`, by layer, stored as
            ``<layer>.input``.
    """
    tensors = {f"{name}.weight": w[::ROW_STEP].contiguous() for name, w in weights.items()}
    tensors |= {f"{name}.input": x.contiguous() for name, x in (activations or {}).items()}
    digests = {f"{name}.weight": digest(weight) for name, weight in weights.items()}
    shapes = {f"{name}.weight": list(weight.shape) for name, weight in weights.items()}
    # one entry: safetensors writes several in no fixed order
    facts = {"row_step": ROW_STEP, "sha256": digests, "shapes": shapes}
    metadata = {"facts": json.dumps(facts, sort_keys=True)}
    save_file(tensors, folder / "expected.safetensors", metadata=metadata)


def start_fixture(folder: Path) -> None:
    """Makes the folder empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def keep_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Copies the named files of an export; all of them must be there."""
    start_fixture(folder)
    for name in names:
        shutil.copyfile(source / name, folder / name)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of the export."""
    return load_file(folder / "model.safetensors")


def layers_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the tensors of each linear layer of the decoder by layer and tensor name."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if layer.endswith("_proj"):
            layers.setdefault(layer, {})[part] = tensor
    return layers
