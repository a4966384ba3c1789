"""Building the engine and the adapter that a configuration names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from phyai.dispatch.config import KernelConfig
from phyai.engine import ActionChunk, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, parse_dtype
from phyai.engine_plugins import find_plugin
from phyai.processing import Preset, detect_preset, get_preset
from phyai.serving.adapter_file import read_adapter
from phyai.serving.adapters import Adapter, built_in_adapter
from phyai.serving.config import PolicyConfig, is_file
from phyai.serving.vectors import relative_mask

_DESCRIBED = ("image_resolution", "chunk_size", "num_steps")
_PROCESSING = ("preset", "cameras", "camera_aliases", "state_dim", "action_dim")
"""What servers read of a description, at its top and below ``processing``."""


class Answering(Protocol):
    """The part of an engine that a server uses."""

    def infer_batch(
        self,
        observations: Any,
        *,
        noise: Any,
        num_steps: Any,
        guidance: Any = None,
        seed: Any = None,
        video: bool = False,
    ) -> list[ActionChunk]:
        """Answer several observations at once."""
        ...

    def warm_up(self, batches: Any = (1,)) -> None:
        """Record what is recorded once."""
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
    engine = _engine(config, _arguments(config, adapter))
    return _with_adapter(config, engine, adapter)


def _arguments(config: PolicyConfig, adapter: Adapter | None) -> Any:
    """Return what the model family is made with."""
    if config.family.startswith("cosmos3"):
        return _cosmos3(config, adapter)
    if config.family == "pi05":
        return _pi05(config, adapter)
    factory: Any = find_plugin(config.family)
    if not hasattr(factory, "serving_args"):
        raise ValueError(
            f"the model family {config.family!r} can not be served: its plugin has no "
            "serving_args; see phyai.engine_plugins.ModelPlugin"
        )
    return factory.serving_args(config)


def _pi05(config: PolicyConfig, adapter: Adapter | None) -> Any:
    from phyai.models.pi05.main_pi05 import PI05Args

    preset: str | Preset | None = config.preset
    if adapter is not None and adapter.action_parts:
        base = get_preset(preset) if preset else detect_preset(config.checkpoint).preset
        preset = _with_parts(base, adapter)
    return PI05Args(
        checkpoint_dir=config.checkpoint,
        preset=preset,
        stats_path=config.stats,
        tokenizer_path=config.tokenizer,
        allow_identity_norm=config.allow_identity_norm,
        num_steps=config.num_steps,
    )


def _cosmos3(config: PolicyConfig, adapter: Adapter | None) -> Any:
    from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args

    unused = {"preset": config.preset, "stats": config.stats, "tokenizer": config.tokenizer}
    for name, value in unused.items():
        if value is not None:
            raise ValueError(
                f"{name} is {str(value)!r}, but a Cosmos3 checkpoint carries all of its "
                f"processing; leave {name} out"
            )
    if adapter is not None and any(part.relative for part in adapter.action_parts):
        raise ValueError(
            f"adapter {adapter.name!r} has relative actions; those of a Cosmos3 policy are absolute"
        )
    return Cosmos3Args(
        config.checkpoint, decoder=config.video, sound=False, num_steps=config.num_steps
    )


def _engine(config: PolicyConfig, arguments: Any) -> Engine:
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Engine(
        EngineArgs(
            config.family,
            arguments,
            EngineConfig(
                device=DeviceConfig(device, parse_dtype(config.dtype or _default_dtype(device))),
                kernel=KernelConfig(config_path=config.kernel_policy),
                parallel=config.parallel,
                runtime=config.runtime,
            ),
        )
    )


def _with_adapter(config: PolicyConfig, engine: Engine, adapter: Adapter | None) -> LoadedPolicy:
    description = engine.describe()
    _check_described(config.family, description)
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


def _check_described(family: str, description: Mapping[str, Any]) -> None:
    processing = description.get("processing", {})
    missing = [key for key in _DESCRIBED if key not in description]
    missing += [f"processing.{key}" for key in _PROCESSING if key not in processing]
    if missing:
        raise ValueError(
            f"the model family {family!r} can not be served: what it describes lacks "
            f"{', '.join(missing)}; see phyai.engine_plugins.ModelPlugin"
        )


def _check_fit(adapter: Adapter, description: Mapping[str, Any]) -> None:
    cameras = description["processing"]["cameras"]
    for key, camera in adapter.cameras.items():
        if camera not in cameras:
            raise ValueError(
                f"adapter {adapter.name!r} maps {key!r} to camera {camera!r}, which the checkpoint "
                f"does not have; it has: {', '.join(cameras)}"
            )
