"""A policy that reads joint positions and answers with a chunk of actions, without pictures."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from phyai.checkpoints import CheckpointError, CheckpointReader, load_into
from phyai.checkpoints.planned import model_tensors
from phyai.dispatch import CallSite
from phyai.engine import ActionChunk
from phyai.layers import Linear, PlainMLP
from phyai.models import inventory
from phyai.processing import Observation, ProcessingError
from phyai.quantization import resolve_quant_plan
from phyai_quant import QuantPlan, use_quant_plan

if TYPE_CHECKING:
    from phyai.serving import PolicyConfig


@dataclass(frozen=True)
class StatePolicyArgs:
    """How to load the policy.

    Attributes:
        checkpoint_dir: folder with ``config.json`` and ``model.safetensors``.
    """

    checkpoint_dir: Path


@dataclass(frozen=True)
class StateConfig:
    """Sizes of a checkpoint."""

    state_dim: int
    width: int
    hidden: int
    chunk_size: int
    action_dim: int

    @classmethod
    def read(cls, directory: Path, shapes: dict[str, tuple[int, ...]]) -> "StateConfig":
        """Returns the sizes that the tensors have, cut into actions as ``config.json`` says.

        Raises:
            CheckpointError: if a tensor is missing or actions do not divide the head.
        """
        try:
            width, state_dim = shapes["encoder.weight"]
            hidden, outputs = shapes["mlp.fc1.weight"][0], shapes["head.weight"][0]
        except KeyError as error:
            raise CheckpointError(f"{directory}: tensor {error} is missing") from None
        file = directory / "config.json"
        action_dim = json.loads(file.read_text()).get("action_dim")
        if not isinstance(action_dim, int) or action_dim < 1 or outputs % action_dim:
            raise CheckpointError(
                f"{file}: action_dim {action_dim} does not divide head.weight's {outputs} rows"
            )
        return cls(state_dim, width, hidden, outputs // action_dim, action_dim)


class StateModel(nn.Module):
    """``head(h + mlp(h))`` of ``h = encoder(state)``.

    The layers own weight formats and kernel call sites: names are those of the checkpoint, which
    quantization plans match, and roles are what kernel policies match.
    """

    def __init__(
        self, config: StateConfig, *, params_dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        place: dict[str, Any] = {"params_dtype": params_dtype, "device": device}
        outputs = config.chunk_size * config.action_dim
        self.encoder = Linear(
            config.state_dim, config.width, bias=True, prefix="encoder", role="head", **place
        )
        self.mlp = PlainMLP(config.width, config.hidden, prefix="mlp", role="trunk", **place)
        self.head = Linear(config.width, outputs, bias=True, prefix="head", role="head", **place)
        self.params_dtype = params_dtype

    def forward(self, state: Tensor) -> Tensor:
        """Maps states ``[B, state_dim]`` to actions ``[B, chunk, action_dim]``."""
        features = self.encoder(state.to(self.params_dtype))
        actions = self.head(features + self.mlp(features))
        return actions.unflatten(1, (self.config.chunk_size, self.config.action_dim)).float()


class StatePolicy:
    """What the engine makes of the family's name: see ``phyai.engine_plugins.ModelPlugin``."""

    @staticmethod
    def serving_args(config: "PolicyConfig") -> StatePolicyArgs:
        """Returns what `phyai serve` makes the policy with."""
        return StatePolicyArgs(config.checkpoint)

    def __init__(
        self,
        args: StatePolicyArgs,
        *,
        device: torch.device,
        params_dtype: torch.dtype,
        runtime: Any = None,  # noqa: ARG002  # about CUDA graphs
    ) -> None:
        self.args = args
        self.device = device
        plan = resolve_quant_plan(args.checkpoint_dir)
        with use_quant_plan(plan):
            self.model = self._load(plan, params_dtype)

    def _load(self, plan: QuantPlan | None, params_dtype: torch.dtype) -> StateModel:
        directory = Path(self.args.checkpoint_dir)
        reader = CheckpointReader(directory)
        config = StateConfig.read(directory, reader.logical_shapes())
        model = StateModel(config, params_dtype=params_dtype, device=self.device)
        load_into(model, model_tensors(reader, plan, "cpu"), source=str(directory))
        return model.eval()

    def infer(
        self,
        observations: Sequence[Observation],
        *,
        noise: Tensor | None,  # noqa: ARG002  # the policy draws none
        seed: int | None,  # noqa: ARG002
        num_steps: int | None,  # noqa: ARG002
    ) -> list[ActionChunk]:
        """Answers a batch of observations.

        Raises:
            ProcessingError: for an observation without a state of the checkpoint's width.
        """
        start = time.perf_counter()
        width = self.model.config.state_dim
        for observation in observations:
            if observation.state is None or np.shape(observation.state) != (width,):
                raise ProcessingError(f"the state is {observation.state}; give {width} numbers")
        states = np.stack([np.asarray(each.state, np.float32) for each in observations])
        with torch.inference_mode():
            actions = self.model(torch.from_numpy(states).to(self.device)).cpu().numpy()
        timing = {"total": 1e3 * (time.perf_counter() - start)}
        return [
            ActionChunk(chunk, chunk, timing, each.task)
            for chunk, each in zip(actions, observations, strict=True)
        ]

    def call_sites(self) -> list[CallSite]:
        """Returns the kernel call sites, in module order."""
        return inventory.call_sites(self.model)

    def linear_layers(self) -> list[Linear]:
        """Returns the layers whose weights have formats, in module order."""
        return inventory.linear_layers(self.model)

    def weight_bytes(self) -> int:
        """Returns the bytes of all parameters."""
        return inventory.weight_bytes(self.model)

    def describe(self) -> dict[str, Any]:
        """Returns sizes and formats, and what servers tell their clients."""
        config = self.model.config
        return {
            "sizes": vars(config),
            "linear_formats": {layer.prefix: layer.spec.spec_id for layer in self.linear_layers()},
            "image_resolution": (0, 0),
            "chunk_size": config.chunk_size,
            "num_steps": 1,
            "processing": {
                "preset": "joint positions",
                "cameras": (),
                "camera_aliases": {},
                "state_dim": config.state_dim,
                "action_dim": config.action_dim,
            },
        }
