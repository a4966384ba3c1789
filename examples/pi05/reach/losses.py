"""Flow-matching loss of π0.5, on the engine's own model.

The sampler runs packed rows against a cache; training runs a padded batch in one pass. Both use
the same layers, so what is trained is what is served.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from phyai.layers import RotaryEmbedding
from phyai.models.pi05.decoder import DecoderLayer
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.stream import LayerModulation, Stream

BETA_CONCENTRATION = 1.5


class Projected(NamedTuple):
    """Queries [T, H, D], keys and values [T, Hkv, D] of packed rows, rotated."""

    query: Tensor
    key: Tensor
    value: Tensor


def sample_time(batch: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draws training times [B] as ``0.999 * Beta(1.5, 1) + 0.001``; noise is at t = 1."""
    uniform = torch.rand(batch, generator=generator, device=device)
    return 0.999 * uniform ** (1 / BETA_CONCENTRATION) + 0.001


def flow_matching_loss(
    model: PI05Model,
    images: Tensor,
    tokens: Tensor,
    token_mask: Tensor,
    actions: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Returns the mean squared error of the predicted velocity.

    Args:
        model: π0.5 model whose parameters require gradients.
        images: fp32 [B, V, 3, H, W] in [-1, 1], every camera present.
        tokens: int64 [B, L], padded on the right.
        token_mask: bool [B, L].
        actions: fp32 normalised chunks [B, chunk, max_action_dim].
        generator: of times and noise, on the actions' device.
    """
    time = sample_time(actions.shape[0], generator, actions.device)
    noise = torch.randn(actions.shape, generator=generator, device=actions.device)
    mixed = time[:, None, None]
    noisy = mixed * noise + (1 - mixed) * actions
    velocity = predict_velocity(model, images, tokens, token_mask, noisy, time)
    return functional.mse_loss(velocity, noise - actions)


def predict_velocity(
    model: PI05Model,
    images: Tensor,
    tokens: Tensor,
    token_mask: Tensor,
    noisy: Tensor,
    time: Tensor,
) -> Tensor:
    """Returns the velocity [B, chunk, A] at ``noisy`` actions and times [B]."""
    batch, views = images.shape[:2]
    features = model.vision(images.flatten(0, 1))
    prompt = model.embed_prompt(tokens.flatten()).view(batch, tokens.shape[1], -1)
    prefix = torch.cat([features.view(batch, -1, features.shape[2]), prompt], dim=1)
    seen = torch.ones(batch, views * features.shape[1], dtype=torch.bool, device=images.device)
    visible = torch.cat([seen, token_mask], dim=1)
    positions = (visible.cumsum(1) - 1).clamp_min(0)
    chunk = noisy.shape[1]
    suffix_positions = visible.sum(1, keepdim=True) + torch.arange(chunk, device=images.device)
    own = torch.ones(batch, chunk, dtype=torch.bool, device=images.device)
    all_visible = torch.cat([visible, own], dim=1)

    step = model.modulate(time)
    x, y = Stream(prefix.flatten(0, 1)), Stream(model.suffix_tokens(noisy, None, step))
    last = len(model.language.layers) - 1
    for index, (language, expert) in enumerate(
        zip(model.language.layers, model.expert.layers, strict=True)
    ):
        modulation = _per_token(step.layers[index], chunk)
        heads, x = language.project(x)
        p = _rotated(language, heads, positions.flatten(), model.prefix_rope)
        heads, y = expert.project(y, modulation)
        s = _rotated(expert, heads, suffix_positions.flatten(), model.expert_rope)
        joint_key = torch.cat([_batched(p.key, batch), _batched(s.key, batch)], dim=1)
        joint_value = torch.cat([_batched(p.value, batch), _batched(s.value, batch)], dim=1)
        attended = _attend(_batched(s.query, batch), joint_key, joint_value, all_visible)
        y = expert.finish(y, attended, modulation)
        if index < last:
            x = language.finish(x, _attend_prefix(p, batch, visible))
    final = None if step.final is None else step.final.repeat_interleave(chunk, 0)
    y = model.expert.final_norm(y, final).view(batch, chunk, -1)
    return model.action_out_proj(y.float())


def _rotated(
    layer: DecoderLayer, heads: Tensor, positions: Tensor, rope: RotaryEmbedding
) -> Projected:
    sizes = layer.sizes
    query, key, value = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
    query, key = rope(positions, query, key)
    return Projected(query, key, value)


def _per_token(modulation: LayerModulation | None, tokens: int) -> LayerModulation | None:
    if modulation is None:
        return None
    return LayerModulation(
        modulation.attention.repeat_interleave(tokens, 0),
        modulation.mlp.repeat_interleave(tokens, 0),
    )


def _batched(rows: Tensor, batch: int) -> Tensor:
    return rows.view(batch, -1, *rows.shape[1:])


def _attend_prefix(projected: Projected, batch: int, visible: Tensor) -> Tensor:
    query, key, value = (
        _batched(rows, batch) for rows in (projected.query, projected.key, projected.value)
    )
    return _attend(query, key, value, visible)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attends [B, S, H, D] queries to the visible keys; returns packed rows [B * S, H, D]."""
    groups = query.shape[2] // key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible[:, None, None, :]
    )
    return out.transpose(1, 2).flatten(0, 1)
