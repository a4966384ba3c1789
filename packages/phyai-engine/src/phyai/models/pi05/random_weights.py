"""A full-size π0.5 or π0 of random weights, made on the device without a checkpoint file."""

from collections.abc import Callable

import torch
from torch import nn

from phyai.layers import Linear
from phyai.models.pi05.config import OPENPI_CAMERAS, Family, PI05Config
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.sizes import DecoderSizes, VisionSizes

_CHUNK_ROWS = 8192


def full_size_config(*, family: Family = "pi05", chunk: int = 50, steps: int = 10) -> PI05Config:
    """Returns the sizes of the published checkpoints: three cameras, 224 pixels."""
    return PI05Config(
        family=family,
        layout="openpi",
        cameras=OPENPI_CAMERAS,
        state_dim=32,
        action_dim=32,
        max_state_dim=32,
        max_action_dim=32,
        chunk_size=chunk,
        num_steps=steps,
        tokenizer_max_length=200 if family == "pi05" else 48,
        image_resolution=(224, 224),
        empty_cameras=0,
        min_period=4e-3,
        max_period=4.0,
        vision=VisionSizes(width=1152, layers=27, heads=16, mlp=4304, patch=14, tokens=256),
        language=DecoderSizes(
            2048, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=16384, vocab=257152
        ),
        expert=DecoderSizes(1024, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=4096),
    )


def random_model(
    config: PI05Config,
    *,
    params_dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> PI05Model:
    """Builds a model under the policy and plan in force and fills it.

    Weights are normal with standard deviation ``K^-1/2``, biases and norms 0.1 around their neutral
    value. The numbers depend on the seed and the order of the modules, not on the weight format:
    all of them are drawn as bf16 values, which a quantizing format then converts.
    """
    model = PI05Model(config, params_dtype=params_dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    for module in model.modules():
        if isinstance(module, Linear):
            for leg in module.legs:
                weight = draw(leg.width, module.in_features) * module.in_features**-0.5
                module.spec.load_weight(module, "weight", weight.bfloat16(), leg.shard_id)
            if module.bias is not None:
                module.bias.data.copy_((0.1 * draw(module.out_features)).bfloat16())
            module.post_load()
            continue
        for name, parameter in module.named_parameters(recurse=False):
            _fill(module, name, parameter, draw)
    return model.eval()


def _fill(
    module: nn.Module, name: str, parameter: nn.Parameter, draw: Callable[..., torch.Tensor]
) -> None:
    neutral = float(type(module).__name__ == "LayerNorm" and name == "weight")
    for rows in parameter.data.split(_CHUNK_ROWS):
        values = draw(*rows.shape)
        rows.copy_((neutral + 0.1 * values).bfloat16())
