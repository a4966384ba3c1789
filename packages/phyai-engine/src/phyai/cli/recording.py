"""Which calls a model makes: recorded from a running engine, or from its shapes alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from phyai.dispatch import CallSite, Selector
    from phyai.engine import Engine
    from phyai.layers import Linear


# Tokens of an instruction in Cosmos3's prompt, and of the empty prompt.
_TEXTS = (82, 10)


@dataclass(frozen=True)
class Call:
    """One question that a call site asked.

    Attributes:
        where: Name of the module that owns the site.
        trace: ``SelectionTrace.as_dict()`` of the answer.
        layer: The linear layer that owns the site, or None.
    """

    where: str
    trace: dict[str, Any]
    layer: "Linear | None" = None


@dataclass(frozen=True)
class Recording:
    """The calls of one chunk and the linear layers of the model."""

    calls: list[Call]
    layers: "list[Linear]"


def record_engine(engine: "Engine") -> Recording:
    """Return the calls that the sites of a warm engine made, in module order."""
    held = list(_modules_of(engine.plugin))
    return _recording(engine.plugin.call_sites(), held)


def record_shapes(checkpoint: Path, dtype: "torch.dtype", target: "Selector") -> Recording:
    """Return the calls of one chunk for a device that is not here, without loading weights.

    The model is built on PyTorch's meta device, so only names, shapes and dtypes are computed. Its
    weights are dense: which of them are quantized, and how, does not change the shapes of a call.

    Args:
        checkpoint: Folder of the checkpoint.
        dtype: Of weights and activations.
        target: Selector of the absent device; parameters take the dtypes that its rows want.
    """
    from phyai.models.families import kernel_family

    build = _cosmos3 if kernel_family(checkpoint) == "cosmos3" else _pi05
    model = build(checkpoint, dtype, target)
    held = list(model.named_modules())
    return _recording([site for _, _, site in _sites(held)], held)


def _pi05(checkpoint: Path, dtype: "torch.dtype", target: "Selector") -> "nn.Module":
    """Return a model without contents that has computed one chunk."""
    import numpy as np

    from phyai.checkpoints import CheckpointReader
    from phyai.dispatch import Selector, kernel_selector_scope
    from phyai.models.pi05.config import PI05Config
    from phyai.models.pi05.keys import canonical
    from phyai.models.pi05.model import PI05Model
    from phyai.processing import Observation, PolicyProcessor
    from phyai_quant import use_quant_plan

    config = PI05Config.read(checkpoint, CheckpointReader(checkpoint, canonical).logical_shapes())
    with kernel_selector_scope(target), use_quant_plan(None):
        model = PI05Model(config, params_dtype=dtype, device="meta")
    processor = PolicyProcessor.from_checkpoint(checkpoint, config, allow_identity_norm=True)
    height, width = config.image_resolution
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    observation = Observation(
        dict.fromkeys(config.cameras, picture),
        np.zeros(config.state_dim, dtype=np.float32),
        "pick up the cup",
    )
    # The rows that run on the meta device are not the answer; no policy restricts them.
    with kernel_selector_scope(Selector(target.catalog, device="cpu")):
        model.sample_actions(processor.preprocess([observation]), seed=0, num_steps=1)
    return model


def _cosmos3(checkpoint: Path, dtype: "torch.dtype", target: "Selector") -> "nn.Module":
    """Return a transformer without contents that has read a prompt and made a velocity."""
    import torch

    from phyai.dispatch import Selector, kernel_selector_scope
    from phyai.models.cosmos3.model import Cosmos3Transformer
    from phyai.models.cosmos3.repository import Repository
    from phyai.models.cosmos3.state import Modalities
    from phyai_quant import use_quant_plan

    repository = Repository.read(checkpoint)
    config, layout = repository.config, repository.policy_layout()
    with kernel_selector_scope(target), use_quant_plan(None):
        model = Cosmos3Transformer(config, params_dtype=dtype, device="meta")
    action = None
    if layout.action is not None:
        action = torch.empty(layout.action.rows, config.action_dim, device="meta")
    shape = (config.latent_channel, layout.frames, layout.height, layout.width)
    state = Modalities(torch.empty(shape, device="meta"), action)
    texts = (torch.zeros(length, dtype=torch.int64) for length in _TEXTS)
    # The rows that run on the meta device are not the answer; no policy restricts them.
    with kernel_selector_scope(Selector(target.catalog, device="cpu")):
        model.velocities(state, 999, [model.prefill(text) for text in texts], layout)
    return model


def _recording(sites: "Iterable[CallSite]", held: "Sequence[tuple[str, nn.Module]]") -> Recording:
    from phyai.layers import Linear

    owners = {id(site): (name, module) for name, module, site in _sites(held)}
    calls = []
    for site in sites:
        name, module = owners.get(id(site), ("", None))
        layer = module if isinstance(module, Linear) else None
        where = layer.prefix if layer is not None and layer.prefix else name
        calls += [Call(where, trace.as_dict(), layer) for trace in site.traces()]
    return Recording(calls, [module for _, module in held if isinstance(module, Linear)])


def _sites(
    held: "Iterable[tuple[str, nn.Module]]",
) -> "Iterator[tuple[str, nn.Module, CallSite]]":
    from phyai.dispatch import CallSite

    for name, module in held:
        for value in vars(module).values():
            if isinstance(value, CallSite):
                yield name, module, value


def _modules_of(plugin: object) -> "Iterator[tuple[str, nn.Module]]":
    """Yield the modules inside the models that a plugin holds."""
    from torch import nn

    for value in vars(plugin).values():
        for model in value.values() if isinstance(value, dict) else (value,):
            if isinstance(model, nn.Module):
                yield from model.named_modules()
