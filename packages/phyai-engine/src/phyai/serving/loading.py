"""Building the engine and the adapter that a configuration names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from phyai.dispatch.config import KernelConfig
from phyai.engine import ActionChunk, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, parse_dtype
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Preset, detect_preset, get_preset
from phyai.serving.adapter_file import read_adapter
from phyai.serving.adapters import Adapter, built_in_adapter
from phyai.serving.config import PolicyConfig, is_file
from phyai.serving.vectors import relative_mask


class Answering(Protocol):
    """The part of an engine that a server uses."""

    def infer_batch(
        self, observations: Any, *, noise: Any, num_steps: Any, guidance: Any = None
    ) -> list[ActionChunk]:
        """Answer several observations at once."""
        ...

    def normalize_actions(self, actions: Any, observation: Any) -> Any:
        """Return actions as the model would have made them."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what is running."""
        ...


@dataclass(frozen=True)
class LoadedPolicy:
    """An engine and how its robot talks."""

    engine: Answering
    adapter: Adapter


def load_policy(config: PolicyConfig) -> LoadedPolicy:
    """Build the engine of a configuration and its adapter.

    An adapter file that describes actions settles the widths of state and actions, and which
    actions are relative.

    Raises:
        ValueError, CheckpointError, ProcessingError, PolicyError, QuantConfigError: As the engine
            and the adapter find them.
    """
    adapter = read_adapter(config.adapter) if is_file(config.adapter) else None
    preset: str | Preset | None = config.preset
    if adapter is not None and adapter.action_parts:
        base = get_preset(preset) if preset else detect_preset(config.checkpoint).preset
        preset = _with_parts(base, adapter)
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments = PI05Args(
        checkpoint_dir=config.checkpoint,
        preset=preset,
        stats_path=config.stats,
        tokenizer_path=config.tokenizer,
        allow_identity_norm=config.allow_identity_norm,
        num_steps=config.num_steps,
    )
    engine = Engine(
        EngineArgs(
            config.plugin,
            arguments,
            EngineConfig(
                device=DeviceConfig(device, parse_dtype(config.dtype or _default_dtype(device))),
                kernel=KernelConfig(config_path=config.kernel_policy),
            ),
        )
    )
    description = engine.describe()
    if adapter is None:
        adapter = built_in_adapter(
            config.adapter, description, default_prompt=config.default_prompt
        )
    elif config.default_prompt is not None:
        adapter = replace(adapter, default_prompt=config.default_prompt)
    _check_fit(adapter, description)
    return LoadedPolicy(engine, adapter)


def _default_dtype(device: str) -> str:
    return "fp32" if device == "cpu" else "bf16"


def _with_parts(preset: Preset, adapter: Adapter) -> Preset:
    states = sum(part.size for part in adapter.state_parts)
    return replace(
        preset,
        name=f"{preset.name}+{adapter.name}",
        state_dim=states or preset.state_dim,
        action_dim=sum(part.size for part in adapter.action_parts),
        delta_mask=relative_mask(adapter.action_parts),
    )


def _check_fit(adapter: Adapter, description: Mapping[str, Any]) -> None:
    cameras = description["processing"]["cameras"]
    for key, camera in adapter.cameras.items():
        if camera not in cameras:
            raise ValueError(
                f"adapter {adapter.name!r} maps {key!r} to camera {camera!r}, which the checkpoint "
                f"does not have; it has: {', '.join(cameras)}"
            )
