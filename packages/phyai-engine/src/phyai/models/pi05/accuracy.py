"""How far a policy's actions are from the reference kernels in fp32, with random weights."""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.config import KernelConfig
from phyai.models.measuring import policy_in_force
from phyai.models.pi05.bench import Setting, request
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.random_weights import full_size_config, random_model
from phyai.models.pi05.runtime import PI05Runtime

PROMPTS = (0, 7, 16, 41, 64, 113, 200)
"""Prompt lengths that are asked in turns, with one to three cameras."""


def questions(config: PI05Config, count: int) -> Iterator[tuple[Setting, int]]:
    """Yields settings of different prompts and cameras, each with a seed."""
    for seed in range(count):
        prompt = min(PROMPTS[seed % len(PROMPTS)], config.tokenizer_max_length)
        views = 1 + seed % len(config.cameras)
        yield Setting(f"question {seed}", views, prompt, chunk=config.chunk_size), seed


def reference_rules() -> dict[str, Any]:
    """Returns a policy of reference rows only."""
    catalog = build_catalog()
    rules = []
    for op in catalog.ops():
        rows = [row.kernel_id for row in catalog.impls(op) if row.reference]
        target = rows[0] if len(rows) == 1 else f"torch.{op}.*"
        rules.append({"id": op, "match": {"op": op}, "restrict_to": target})
    return {"rules": rules}


def _answers(
    config: PI05Config, device: str, count: int, dtype: torch.dtype, kernels: KernelConfig
) -> list[Tensor]:
    """Returns the way from noise to actions for every question, on the CPU."""
    found: list[Tensor] = []
    with policy_in_force(kernels, device, config.family):
        model = random_model(config, params_dtype=dtype, device=torch.device(device))
        graphs = torch.device(device).type == "cuda" and dtype != torch.float32
        sampler = PI05Runtime(model) if graphs else model
        for setting, seed in questions(config, count):
            noise = model.starting_point(1, None, seed)
            inputs = request(model, setting, seed)
            found.append(sampler.sample_actions(inputs, noise=noise).cpu() - noise)
    return found


def compare_with_reference(
    policies: Sequence[Path | None],
    device: str,
    *,
    inputs: int = 64,
    config: PI05Config | None = None,
) -> Iterator[dict[str, Any]]:
    """Compares policies in bf16 with the reference rows in fp32, without TF32.

    All models hold the same bf16 numbers before a policy quantizes them. Compared is the way from
    noise to actions, which an untrained model makes small beside the noise.

    Args:
        policies: files with kernel rules and quantization; None for no policy.
        device: where all run.
        inputs: seeded questions.
        config: sizes; the published ones if None.

    Yields:
        For each policy, mean and least cosine and the largest relative error.
    """
    config = full_size_config() if config is None else config
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        reference = KernelConfig(policy_config=reference_rules())
        expected = _answers(config, device, inputs, torch.float32, reference)
        for policy in policies:
            gc.collect()
            actual = _answers(
                config, device, inputs, torch.bfloat16, KernelConfig(config_path=policy)
            )
            yield _difference(actual, expected)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Any]:
    pairs = [(one.flatten(), other.flatten()) for one, other in zip(actual, expected, strict=True)]
    cosines = torch.stack([torch.cosine_similarity(one, other, dim=0) for one, other in pairs])
    errors = [float((one - other).norm() / other.norm()) for one, other in pairs]
    return {
        "inputs": len(pairs),
        "mean_cosine": float(cosines.mean()),
        "least_cosine": float(cosines.min()),
        "largest_relative_error": max(errors),
    }
