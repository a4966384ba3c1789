"""Capture queries, keys and values of the reach policy's language model.

    python scripts/capture_attention_operands.py [--out FILE]

One chunk of actions is predicted on the CPU and the operands of the self-attention over images and
prompt are stored, one layer after the other as a batch: ``query`` bf16 ``[layers, 8, S, 64]``,
``key`` and ``value`` ``[layers, 1, S, 64]``. The attention benchmarks measure their quality on
them.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "packages" / "piper-kernels" / "benchmarks" / "data" / "reach_attention.safetensors"
LAYERS = 4


@contextmanager
def recorded_calls() -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Record the rotated query, key and value ``[rows, heads, D]`` of every attention call."""
    from phyai.layers.attention import PagedAttention
    from phyai.runtime.paged import PagedKVCache

    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    written: list[tuple[Tensor, Tensor]] = []
    write, forward = PagedKVCache.write, PagedAttention.forward

    def record_write(
        self: PagedKVCache, layer: int, start: int, key: Tensor, value: Tensor
    ) -> None:
        written.append((key.clone(), value.clone()))
        write(self, layer, start, key, value)

    def record_query(self: PagedAttention, query: Tensor, *arguments: Any) -> Tensor:
        calls.append((query.clone(), *written[-1]))
        return forward(self, query, *arguments)

    with (
        mock.patch.object(PagedKVCache, "write", record_write),
        mock.patch.object(PagedAttention, "forward", record_query),
    ):
        yield calls


def capture() -> dict[str, Tensor]:
    """Predict one chunk and return the tensors to store."""
    sys.path.insert(0, str(ROOT / "examples" / "pi05"))
    demo, evaluation = (import_module(f"reach.{name}") for name in ("demo", "evaluate"))
    rollout = evaluation.EngineRollout(demo.build_engine(None))
    with recorded_calls() as calls:
        evaluation.evaluate(rollout, episodes=1, seed=0)
    rows = max(len(query) for query, key, _ in calls if len(query) == len(key))
    layers = [call for call in calls if len(call[0]) == len(call[1]) == rows][:LAYERS]
    stacked = (torch.stack(parts).transpose(1, 2) for parts in zip(*layers, strict=True))
    names = ("query", "key", "value")
    return {name: x.bfloat16().contiguous() for name, x in zip(names, stacked, strict=True)}


def main() -> None:
    """Capture and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    tensors = capture()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.out)
    sizes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    sys.stdout.write(f"{options.out}: {sizes}\n")


if __name__ == "__main__":
    main()
