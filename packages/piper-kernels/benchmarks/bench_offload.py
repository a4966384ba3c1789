"""Weights on the host: the two-buffer pipeline against refills and layers one after another."""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from _harness import WrongResultError, device, main
from _report import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "piper_kernels" / "offload.py"
LAYERS = 8


def load_example() -> ModuleType:
    """Import the offload example from its file."""
    spec = importlib.util.spec_from_file_location("piper_offload_example", EXAMPLE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"cannot import {EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measure_source(example: ModuleType, source: str, size: int, tokens: int) -> dict:
    """Check and time the pipeline with INT8 weights ``[size, size]`` from one host source."""
    target = device().type
    dense = [torch.randn(size, size).mul_(size**-0.5).bfloat16() for _ in range(LAYERS)]
    x = torch.randn(tokens, size, dtype=torch.bfloat16, device=target)
    name = f"offload {LAYERS} ConvRot INT8 layers {size}x{size}, {tokens} tokens, {source}"
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pipeline, resident = example.build(dense, "int8", source, target, Path(folder))
        expected = x
        for weight in resident:
            hidden = torch.nn.functional.linear(expected, weight)
            expected = torch.nn.functional.rms_norm(expected + hidden, x.shape[-1:])
        if not torch.equal(pipeline.run(x), expected):
            raise WrongResultError(f"{name}: differs from resident weights; not timed")
        refill, compute, both = (
            example.milliseconds(lambda parts=parts: pipeline.run(x, **parts), target, 5)
            for parts in ({"compute": False}, {"copy": False}, {})
        )
    moved = LAYERS * sum(t.nbytes for t in example.inner_tensors(resident[0]))
    return {
        "case": name,
        "ms": both,
        "gbps": moved / both / 1e6,
        "baseline_ms": refill + compute,
        "ratio": (refill + compute) / both,
        "refill_ms": refill,
        "compute_ms": compute,
    }


def run(quick: bool) -> dict:
    """Measure pinned memory and packed GGUF bytes."""
    example = load_example()
    size, tokens = (128, 8) if quick else (4096, 8192)
    return {"rows": [measure_source(example, kind, size, tokens) for kind in ("pinned", "gguf")]}


if __name__ == "__main__":
    main(run)
