"""The engine's own model, made trainable: first weights, export of weights, batched inference."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from phyai.checkpoints.loader import load_into
from phyai.layers import Embedding, LayerNorm, Linear, RMSNorm
from phyai.models.pi05 import keys
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.savings import Savings
from phyai.models.pi05.vision import PatchEmbedding
from phyai.processing.inputs import ModelInputs
from reach.batched import BatchPolicy
from reach.data import ObservationBatch
from reach.normalisation import Statistics, denormalise
from reach.sizes import EMBEDDING, tensor_shapes

_RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc2")
_POSITION_STD = 0.2


def initial_tensors(config: PI05Config, seed: int) -> dict[str, Tensor]:
    """Random first weights under their checkpoint names.

    Linear layers keep the variance of their input; those that write into a residual stream are
    divided by the square root of its number of writers. Adaptive norms start as plain ones: no
    scale, no shift, a gate of 1. The first velocity is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(config)
    return {name: _initial(name, shape, config, generator) for name, shape in shapes.items()}


def _initial(
    name: str, shape: tuple[int, ...], config: PI05Config, generator: torch.Generator
) -> Tensor:
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer == "dense" and kind == "bias":
        width = shape[0] // 3
        return torch.cat([torch.zeros(2 * width), torch.ones(width)])
    if layer in ("dense", "action_out_proj") or (kind == "bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape) if name.startswith(keys.VISION) else torch.zeros(shape)
    if layer == "position_embedding":
        return torch.randn(shape, generator=generator) * _POSITION_STD
    std = math.prod(shape[1:]) ** -0.5
    if layer in _RESIDUAL_OUTPUTS:
        depth = config.vision.layers if name.startswith(keys.VISION) else config.language.layers
        std /= (2 * depth) ** 0.5
    return torch.randn(shape, generator=generator) * std


def build_model(
    config: PI05Config, tensors: Mapping[str, Tensor], device: torch.device | str
) -> PI05Model:
    """The fp32 model with these weights, whose parameters require gradients.

    Every tensor is kept, and nothing is computed ahead of time from weights, so that they may
    change between two calls.

    Raises:
        CheckpointError: the tensors do not fit the configuration.
    """
    model = PI05Model(
        config,
        params_dtype=torch.float32,
        device=device,
        savings=Savings(lean_last_layer=False, precompute_modulation=False),
    )
    load_into(model, {name: _reader(t) for name, t in tensors.items()}, source="the weights")
    return model.requires_grad_(True)


def _reader(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def checkpoint_tensors(model: PI05Model) -> dict[str, Tensor]:
    """The weights under their checkpoint names: fused projections are taken apart again."""
    tensors: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Linear):
            tensors |= _linear_tensors(module)
        elif isinstance(module, LayerNorm):
            tensors[f"{module.prefix}.weight"] = module.weight
            tensors[f"{module.prefix}.bias"] = module.bias
        elif isinstance(module, RMSNorm):
            tensors[f"{module.prefix}.weight"] = module.weight
        elif isinstance(module, Embedding):
            tensors[EMBEDDING] = module.weight
        elif isinstance(module, PatchEmbedding):
            tensors[f"{module.prefix}.position_embedding.weight"] = module.position
    shapes = tensor_shapes(model.config)
    # The patch convolution is a matrix in the model and a kernel in a checkpoint.
    return {name: tensors[name].detach().view(shape) for name, shape in shapes.items()}


def _linear_tensors(layer: Linear) -> dict[str, Tensor]:
    parent = layer.prefix.rpartition(".")[0]
    tensors: dict[str, Tensor] = {}
    start = 0
    for leg in layer.legs:
        rows = slice(start, start + leg.width)
        name = f"{parent}.{leg.name}" if parent else leg.name
        tensors[f"{name}.weight"] = layer.weight[rows]
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias[rows]
        start += leg.width
    return tensors


def batch_policy(model: PI05Model, statistics: Statistics) -> BatchPolicy:
    """The model as a policy over batches; a seed gives the same noise as in phyai's engine."""
    config = model.config
    action = statistics.to(model.device).action

    def act(observation: ObservationBatch, seeds: Sequence[int]) -> Tensor:
        shape = (1, config.chunk_size, config.max_action_dim)
        noise = torch.cat(
            [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )
        inputs = ModelInputs(
            images=observation.images,
            image_mask=observation.image_mask,
            tokens=observation.tokens,
            token_mask=observation.token_mask,
            state=None,
            prompts=("",) * len(seeds),
        )
        normalised = model.sample_actions(inputs, noise=noise)
        return denormalise(normalised[..., : config.action_dim], action)

    return act
