"""Train the reach policy by flow matching on the expert's chunks.

As a script: ``python examples/pi05/reach/train.py --device cuda --minutes 10 --out DIR``.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1]))

from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.model import PI05Model
from reach.batched import batched_rollout
from reach.data import TrainingBatch, dataset_statistics, sample_batch
from reach.export import export_checkpoint
from reach.losses import flow_matching_loss
from reach.normalisation import Statistics, normalise
from reach.policy import batch_policy, build_model, checkpoint_tensors, initial_tensors
from reach.prompts import PromptTable
from reach.sizes import count_parameters, reach_config
from reach.tokenizer import build_tokenizer

VALIDATION_SEED = 1_000_000
"""First seed of the episodes that choose the best weights; the final evaluation uses others."""
_BETAS = (0.9, 0.95)
_FINAL_SHARE = 0.02
_EMA_RAMP = 10

Loss = Callable[[PI05Model, TrainingBatch, torch.Generator], Tensor]


@dataclass(frozen=True)
class TrainingOptions:
    """Settings of a run.

    Attributes:
        out: folder of the checkpoint.
        steps: most optimiser steps.
        minutes: most minutes of training; the learning rate follows the scarcer of the two.
        batch: samples of a step.
        device: torch device.
        learning_rate: peak.
        warmup: steps until the peak.
        weight_decay: of matrices only.
        ema: decay of the averaged weights, which are evaluated and exported.
        bf16: autocast to bfloat16.
        evaluate_every: steps between closed-loop evaluations; 0 evaluates only at the end.
        episodes: episodes of an evaluation.
        log_every: steps between printed lines.
        seed: of the first weights and of the data.
    """

    out: Path
    steps: int = 20_000
    minutes: float = math.inf
    batch: int = 1024
    device: str = "cuda"
    learning_rate: float = 1e-3
    warmup: int = 500
    weight_decay: float = 0.01
    ema: float = 0.999
    bf16: bool = False
    evaluate_every: int = 2000
    episodes: int = 200
    log_every: int = 100
    seed: int = 0


@dataclass
class _Progress:
    """Where a run stands."""

    options: TrainingOptions
    step: int = 0
    start: float = field(default_factory=time.perf_counter)
    best: float = -1.0
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def minutes(self) -> float:
        return (time.perf_counter() - self.start) / 60

    @property
    def share(self) -> float:
        """Part of the budget that is used, 0 to 1."""
        used = max(self.step / self.options.steps, self.minutes / self.options.minutes)
        return min(used, 1.0)


def learning_rate(options: TrainingOptions, step: int, share: float) -> float:
    """Linear warm-up over the first steps, times a half cosine over the budget.

    Args:
        options: peak and length of the warm-up.
        step: steps done so far.
        share: part of the budget that is used, 0 to 1.
    """
    ramp = min(1.0, (step + 1) / options.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return options.learning_rate * ramp * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)


def chunk_loss(model: PI05Model, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Flow-matching loss of a batch whose actions are normalised and padded."""
    return flow_matching_loss(
        model, batch.images, batch.tokens, batch.token_mask, batch.actions, generator
    )


def prepare(batch: TrainingBatch, statistics: Statistics, config: PI05Config) -> TrainingBatch:
    """Normalise the actions and pad them with zeros to [B, chunk, max_action_dim]."""
    actions = normalise(batch.actions, statistics.action)
    return replace(
        batch, actions=functional.pad(actions, (0, config.max_action_dim - config.action_dim))
    )


def train(
    options: TrainingOptions, config: PI05Config | None = None, loss: Loss = chunk_loss
) -> dict[str, float]:
    """Train, evaluate in closed loop, keep the best averaged weights in ``options.out``.

    Args:
        options: settings.
        config: sizes, those of the shipped policy by default.
        loss: of a prepared batch.

    Returns:
        What ``training.json`` in the folder says of the exported weights: step, loss, success.
    """
    config = reach_config() if config is None else config
    device = torch.device(options.device)
    statistics = dataset_statistics()
    on_device = statistics.to(device)
    prompts = PromptTable.build(build_tokenizer(), statistics.state, device)
    first = initial_tensors(config, options.seed)
    model, averaged = (build_model(config, first, device) for _ in range(2))
    averaged.requires_grad_(False)
    optimiser = _optimiser(model, options)
    generator = torch.Generator(device).manual_seed(options.seed)
    progress = _Progress(options)
    print(f"{count_parameters(config):,} parameters, batch {options.batch}, {device}")
    recent: list[Tensor] = []
    while progress.share < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(options, progress.step, progress.share)
        batch = sample_batch(options.batch, generator, device, prompts)
        batch = prepare(batch, on_device, config)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            value = loss(model, batch, generator)
        recent.append(_update(model, optimiser, value))
        progress.step += 1
        _average(averaged, model, options.ema, progress.step)
        if progress.step % options.log_every == 0:
            _print(progress, recent)
        if options.evaluate_every and progress.step % options.evaluate_every == 0:
            _evaluate(progress, averaged, statistics, prompts, recent)
            recent.clear()
    if not progress.history or progress.history[-1]["step"] != progress.step:
        _evaluate(progress, averaged, statistics, prompts, recent)
    return max(progress.history, key=lambda entry: (entry["success"], entry["step"]))


def _optimiser(model: PI05Model, options: TrainingOptions) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = torch.device(options.device).type == "cuda"
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=_BETAS, fused=fused)


def _update(model: PI05Model, optimiser: torch.optim.AdamW, loss: Tensor) -> Tensor:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


@torch.no_grad()
def _average(averaged: PI05Model, model: PI05Model, decay: float, step: int) -> None:
    """Move the averaged weights towards the model's, faster in the beginning."""
    weight = 1 - min(decay, (1 + step) / (_EMA_RAMP + step))
    for target, source in zip(averaged.parameters(), model.parameters(), strict=True):
        target.lerp_(source, weight)


def _print(progress: _Progress, recent: list[Tensor]) -> None:
    last = torch.stack(recent[-progress.options.log_every :]).mean().item()
    print(
        f"step {progress.step:6d}  {progress.minutes:6.2f} min  loss {last:.4f}  "
        f"{progress.share:.0%} of the budget",
        flush=True,
    )


def _evaluate(
    progress: _Progress,
    averaged: PI05Model,
    statistics: Statistics,
    prompts: PromptTable,
    recent: list[Tensor],
) -> None:
    """Closed-loop success of the averaged weights; export them when they are the best so far."""
    options = progress.options
    seeds = range(VALIDATION_SEED, VALIDATION_SEED + options.episodes)
    policy = batch_policy(averaged, statistics)
    result = batched_rollout(policy, seeds, prompts, options.device)
    loss = torch.stack(recent).mean().item() if recent else math.nan
    entry = {
        "step": progress.step,
        "minutes": round(progress.minutes, 2),
        "loss": loss,
        "success": result.success_rate,
        "mean_steps": result.steps.float().mean().item(),
    }
    progress.history.append(entry)
    print(f"step {progress.step:6d}  success {result.success_rate:.1%} of {options.episodes}")
    if result.success_rate >= progress.best:
        progress.best = result.success_rate
        tensors = checkpoint_tensors(averaged)
        export_checkpoint(options.out, tensors, averaged.config, statistics)
    options.out.mkdir(parents=True, exist_ok=True)
    log = {"options": asdict(options), "evaluations": progress.history}
    (options.out / "training.json").write_text(json.dumps(log, indent=2, default=str) + "\n")


def parse_options(arguments: list[str] | None = None) -> TrainingOptions:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Train the reach policy")
    defaults = TrainingOptions(out=Path("reach-checkpoint"))
    for name, value in vars(defaults).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    return TrainingOptions(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Command line."""
    torch.set_float32_matmul_precision("high")
    entry = train(parse_options())
    print(f"exported step {entry['step']:.0f} with success {entry['success']:.1%}")


if __name__ == "__main__":
    main()
