"""A transformer of random weights, drawn where it lives, without a checkpoint file."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from phyai.layers import Linear
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.media import ModalityEmbedding
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.parallel import Parallel

_CHUNK_ROWS = 8192


def random_transformer(
    config: Cosmos3Config,
    *,
    params_dtype: torch.dtype,
    device: torch.device | str,
    domains: Sequence[int] | None = None,
    parallel: Parallel | None = None,
    seed: int = 0,
    gain: float | None = None,
) -> Cosmos3Transformer:
    """Builds a model under the policy and plan in force and fills it.

    Norms are uniform in 0.5 to 1.5, biases 0.05 and modality embeddings 0.5 times normal values:
    nothing is at its neutral value. The numbers depend on the seed and the order of the modules,
    not on weight format or degree of parallelism: whole tensors are drawn as bf16 values, of which
    each rank keeps its part.

    Args:
        config: sizes.
        params_dtype: as in `Cosmos3Transformer`.
        device: likewise.
        domains: likewise.
        parallel: likewise.
        seed: of the numbers, which differ between kinds of devices.
        gain: standard deviation of matrices; ``K^-1/2`` if None.
    """
    model = Cosmos3Transformer(
        config, params_dtype=params_dtype, device=device, domains=domains, parallel=parallel
    )
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    for module in model.modules():
        if isinstance(module, Linear):
            _fill_linear(module, draw, gain)
        elif module is model.embed_tokens:
            _fill_vocabulary(model, draw)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                _fill(module, name, parameter, draw, generator, gain)
    return model.eval()


def _fill_linear(module: Linear, draw: Callable[..., Tensor], gain: float | None) -> None:
    for leg, part in zip(module.legs, module.slices, strict=True):
        scale = part.full_shape[1] ** -0.5 if gain is None else gain
        weight = (draw(*part.full_shape) * scale).bfloat16()
        module.spec.load_weight(module, "weight", weight, leg.shard_id)
    if module.bias is not None:
        module.bias.data.copy_((0.05 * draw(module.out_features)).bfloat16())
    module.post_load()


def _fill_vocabulary(model: Cosmos3Transformer, draw: Callable[..., Tensor]) -> None:
    table = model.embed_tokens
    for first in range(0, table.vocab, _CHUNK_ROWS):
        stop = min(first + _CHUNK_ROWS, table.vocab)
        rows = draw(stop - first, table.width).bfloat16()
        start = max(first, table.start)
        held = min(stop, table.start + table.weight.shape[0])
        if start < held:
            part = rows[start - first : held - first]
            table.weight.data[start - table.start : held - table.start].copy_(part)


def _fill(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    draw: Callable[..., Tensor],
    generator: torch.Generator,
    gain: float | None,
) -> None:
    if parameter.ndim == 1 and not isinstance(module, ModalityEmbedding):
        uniform = torch.rand(parameter.shape, generator=generator, device=parameter.device)
        parameter.data.copy_((0.5 + uniform).bfloat16())
        return
    scale = 0.5 if isinstance(module, ModalityEmbedding) else 0.05
    if name == "weight" and parameter.ndim == 3:
        scale = parameter.shape[1] ** -0.5 if gain is None else gain
    parameter.data.copy_((scale * draw(*parameter.shape)).bfloat16())
