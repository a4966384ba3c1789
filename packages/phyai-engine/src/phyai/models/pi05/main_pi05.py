"""The engine's entry to π0.5 and π0: arguments, checkpoint, processors, model."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.dispatch import CallSite
from phyai.engine import ActionChunk
from phyai.engine_config import RuntimeConfig
from phyai.guidance import Guidance
from phyai.layers import Linear
from phyai.models import inventory
from phyai.models.pi05.loading import load_pi05
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.runtime import PI05Runtime
from phyai.models.pi05.savings import Savings
from phyai.processing.inputs import Observation
from phyai.processing.pipeline import PolicyProcessor
from phyai.processing.presets import Preset
from phyai.quantization import resolve_quant_plan
from phyai_quant import use_quant_plan


@dataclass(frozen=True)
class PI05Args:
    """How to load a π0.5 or π0 checkpoint.

    Attributes:
        checkpoint_dir: folder in LeRobot's or openpi's PyTorch layout.
        preset: prompt form, image filter and normalisation; found from the files if None.
        stats_path: statistics to use instead of the checkpoint's.
        tokenizer_path: tokenizer file or folder to use instead of the checkpoint's.
        allow_identity_norm: run without statistics instead of refusing.
        savings: exact simplifications to use.
        num_steps: Euler steps, the checkpoint's number if None.
    """

    checkpoint_dir: Path
    preset: str | Preset | None = None
    stats_path: Path | None = None
    tokenizer_path: Path | None = None
    allow_identity_norm: bool = False
    savings: Savings = field(default_factory=Savings.all)
    num_steps: int | None = None


class PI05Policy:
    """A loaded π0.5 or π0 policy."""

    def __init__(
        self,
        args: PI05Args,
        *,
        device: torch.device,
        params_dtype: torch.dtype,
        runtime: RuntimeConfig | None = None,
    ) -> None:
        self.args = args
        self.device = device
        with use_quant_plan(resolve_quant_plan(args.checkpoint_dir)):
            self.model: PI05Model = load_pi05(
                args.checkpoint_dir,
                device=device,
                params_dtype=params_dtype,
                savings=args.savings,
            )
        runtime = RuntimeConfig() if runtime is None else runtime
        self.runtime: PI05Runtime | None = None
        if device.type == "cuda" and runtime.cuda_graphs and args.savings == Savings.all():
            self.runtime = PI05Runtime(
                self.model, lanes=runtime.lanes, reuse=runtime.reuse_unchanged
            )
        self.processor: PolicyProcessor = PolicyProcessor.from_checkpoint(
            args.checkpoint_dir,
            self.model.config,
            preset=args.preset,
            stats=args.stats_path,
            tokenizer=args.tokenizer_path,
            allow_identity_norm=args.allow_identity_norm,
        )

    def warm_up(self, batches: Sequence[int]) -> None:
        """Records the graphs of every length of prompt, with all cameras."""
        if self.runtime is not None:
            steps = None if self.args.num_steps is None else [self.args.num_steps]
            views = [len(self.model.config.cameras)]
            self.runtime.warm_up(batches=batches, views=views, steps=steps)

    def infer(
        self,
        observations: Sequence[Observation],
        *,
        noise: Tensor | None,
        seed: int | None,
        num_steps: int | None,
        guidance: Guidance | None = None,
    ) -> list[ActionChunk]:
        """Answers a batch of observations, guided by the chunks before if asked to."""
        start = time.perf_counter()
        inputs = self.processor.preprocess(observations)
        prepared = time.perf_counter()
        steps = self.args.num_steps if num_steps is None else num_steps
        sampler = self.model if self.runtime is None else self.runtime
        normalized = sampler.sample_actions(
            inputs, noise=noise, seed=seed, num_steps=steps, guidance=guidance
        ).cpu()
        sampled = time.perf_counter()
        actions = self.processor.postprocess(normalized, observations)
        done = time.perf_counter()
        timing = {
            "preprocess": 1e3 * (prepared - start),
            "model": 1e3 * (sampled - prepared),
            "postprocess": 1e3 * (done - sampled),
            "total": 1e3 * (done - start),
        }
        return [
            ActionChunk(robot, model, timing, prompt)
            for robot, model, prompt in zip(
                actions, normalized.numpy(), inputs.prompts, strict=True
            )
        ]

    def normalize_actions(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        """Returns robot actions [T, action_dim] as the model makes them, [T, max_action_dim]."""
        return self.processor.normalize_actions(actions, observation)

    def call_sites(self) -> list[CallSite]:
        """Returns the kernel call sites of the model, in module order."""
        return inventory.call_sites(self.model)

    def linear_layers(self) -> list[Linear]:
        """Returns the layers whose weights have formats, in module order."""
        return inventory.linear_layers(self.model)

    def weight_bytes(self) -> int:
        """Returns the bytes of all parameters, of packed ones as they are stored."""
        return inventory.weight_bytes(self.model)

    def describe(self) -> dict[str, Any]:
        """Returns shapes, formats, preset and processors."""
        config = self.model.config
        formats = Counter(layer.spec.spec_id for layer in self.linear_layers())
        return {
            "family": config.family,
            "layout": config.layout,
            "checkpoint": str(self.args.checkpoint_dir),
            "cameras": list(config.cameras),
            "image_resolution": list(config.image_resolution),
            "state_dim": config.state_dim,
            "action_dim": config.action_dim,
            "chunk_size": config.chunk_size,
            "num_steps": self.args.num_steps or config.num_steps,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "weight_bytes": self.weight_bytes(),
            "linear_formats": dict(formats),
            "savings": asdict(self.model.savings),
            "cuda_graphs": self.runtime is not None,
            "lanes": 1 if self.runtime is None else self.runtime.lanes,
            "sizes": {
                "vision": asdict(config.vision),
                "language": asdict(config.language),
                "expert": asdict(config.expert),
            },
            "processing": self.processor.describe(),
        }
