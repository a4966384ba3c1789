import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from phyai_quant.plan import QuantPlan
from phyai_quant.policy_section import parse_quantization_section

SHAPES = {"q_proj": (67, 256), "o_proj": (130, 256), "down_proj": (64, 384)}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Two layers of three projections, with a zero row, a huge row, norms and an embedding."""
    torch.manual_seed(3)
    found = {"model.embed_tokens.weight": torch.randn(11, 256, dtype=torch.bfloat16)}
    for index in range(2):
        prefix = f"model.layers.{index}"
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, dtype=torch.bfloat16)
            weight[5] = 0
            weight[7] *= 1e4
            found[f"{prefix}.{name}.weight"] = weight
        found[f"{prefix}.norm.weight"] = torch.randn(256)
    return found


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes tensors as a folder with one shard per layer number and an index."""

    def write(tensors: dict[str, torch.Tensor], name: str = "dense", config: Any = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        shards: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            number = "2" if ".layers.1." in key else "1"
            shards.setdefault(f"model-{number}.safetensors", {})[key] = tensor
        for file, part in shards.items():
            save_file(part, folder / file, metadata={"format": "pt"})
        index = {key: file for file, part in shards.items() for key in part}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
        (folder / "config.json").write_text(json.dumps(config or {"model_type": "tiny"}))
        return folder

    return write


@pytest.fixture
def dense(weights, write_checkpoint) -> Path:
    folder = write_checkpoint(weights)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    return folder


def policy(weight: dict[str, Any], act: dict[str, Any] | None = None, glob: str = "*") -> QuantPlan:
    rule: dict[str, Any] = {"match": {"glob": glob}, "weight": weight}
    if act is not None:
        rule["input"] = act
    plan = parse_quantization_section({"rules": [rule]})
    assert plan is not None
    return plan


@pytest.fixture
def make_policy() -> Callable[..., QuantPlan]:
    return policy
