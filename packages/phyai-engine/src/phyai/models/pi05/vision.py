"""SigLIP vision tower and the projection of its features into the language model's width."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, copy_slot
from phyai.layers import CachelessAttention, LayerNorm, Leg, Linear, PlainMLP
from phyai.layers.norm import normed_for
from phyai.models.pi05 import keys
from phyai.models.pi05.sizes import VisionSizes
from phyai_quant import materialize

ROLE = "vision"


class PatchLinear(Linear):
    """The patch convolution as a matrix product: the stored kernel is flattened when loaded."""

    def _weight_slot(
        self, key: str, tensor: str, legs: range, shard_id: str | int | None
    ) -> TensorSlot:
        slot = super()._weight_slot(key, tensor, legs, shard_id)
        return replace(slot, load=lambda source: slot.load(source.flatten(1)))


class PatchEmbedding(nn.Module):
    """Cuts images into patches and maps each to a vector, plus a learned position.

    The convolution's stride equals its kernel, so it is one matrix product over flattened patches
    in the order (channel, row, column). Kept in fp32 in every mode and never quantized.
    """

    def __init__(self, sizes: VisionSizes, *, device: torch.device | str) -> None:
        super().__init__()
        self.patch: int = sizes.patch
        self.prefix = f"{keys.VISION}.embeddings"
        self.project: PatchLinear = PatchLinear(
            3 * sizes.patch**2,
            sizes.width,
            bias=True,
            prefix=f"{self.prefix}.patch_embedding",
            role=ROLE,
            params_dtype=torch.float32,
            device=device,
            spec=materialize(None),
        )
        self.position: nn.Parameter = nn.Parameter(
            torch.empty(sizes.tokens, sizes.width, device=device), requires_grad=False
        )

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [B, 3, H, W] in [-1, 1] to [B, tokens, width] in fp32."""
        batch, channels, height, width = images.shape
        p = self.patch
        rows, columns = height // p, width // p
        patches = images[:, :, : rows * p, : columns * p]
        patches = patches.reshape(batch, channels, rows, p, columns, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        return self.project(patches.float()) + self.position

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the position table."""
        yield copy_slot(f"{self.prefix}.position_embedding.weight", self.position)


class VisionBlock(nn.Module):
    """Pre-norm transformer block without a mask or positions."""

    layer_norm1: LayerNorm
    layer_norm2: LayerNorm

    def __init__(
        self,
        sizes: VisionSizes,
        index: int,
        *,
        params_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        prefix = f"{keys.VISION}.encoder.layers.{index}"
        width = sizes.width
        self.heads: int = sizes.heads
        self.head_dim: int = width // sizes.heads
        self.layer_norm1, self.layer_norm2 = (
            LayerNorm(
                width,
                prefix=f"{prefix}.{name}",
                adds=adds,
                activation_dtype=params_dtype,
                device=device,
            )
            for name, adds in (("layer_norm1", index > 0), ("layer_norm2", True))
        )
        self.qkv_proj: Linear = Linear(
            width,
            tuple(Leg(f"{name}_proj", width, name) for name in "qkv"),
            bias=True,
            prefix=f"{prefix}.self_attn.qkv_proj",
            role=ROLE,
            params_dtype=params_dtype,
            device=device,
        )
        self.out_proj: Linear = Linear(
            width,
            width,
            bias=True,
            prefix=f"{prefix}.self_attn.out_proj",
            role=ROLE,
            params_dtype=params_dtype,
            device=device,
        )
        self.attention: CachelessAttention = CachelessAttention(
            self.heads, self.head_dim, role=ROLE
        )
        self.mlp: PlainMLP = PlainMLP(
            width,
            sizes.mlp,
            prefix=f"{prefix}.mlp",
            role=ROLE,
            params_dtype=params_dtype,
            device=device,
        )

    def forward(self, x: Tensor, update: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        """Maps rows [B * tokens, width] to the same shape.

        Args:
            x: the residual.
            update: what the block before adds to it, None for the first block.
            tokens: rows of an image, which see each other.

        Returns:
            The residual and what this block adds to it: the sum belongs to the next norm.
        """
        normed, x = normed_for(self.qkv_proj, self.layer_norm1, x, update)
        qkv = self.qkv_proj(normed)
        query, key, value = qkv.view(-1, tokens, 3, self.heads, self.head_dim).unbind(2)
        attended = self.attention(query, key, value).reshape(x.shape)
        normed, x = normed_for(self.mlp.fc1, self.layer_norm2, x, self.out_proj(attended))
        return x, self.mlp(normed)


class VisionTower(nn.Module):
    """Patches, blocks, final norm and projector."""

    def __init__(
        self,
        sizes: VisionSizes,
        out_width: int,
        *,
        params_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.params_dtype = params_dtype
        self.embeddings: PatchEmbedding = PatchEmbedding(sizes, device=device)
        self.layers: nn.ModuleList = nn.ModuleList(
            VisionBlock(sizes, index, params_dtype=params_dtype, device=device)
            for index in range(sizes.layers)
        )
        self.post_layernorm: LayerNorm = LayerNorm(
            sizes.width,
            prefix=f"{keys.VISION}.post_layernorm",
            adds=True,
            activation_dtype=params_dtype,
            device=device,
        )
        self.projector: Linear = Linear(
            sizes.width,
            out_width,
            bias=True,
            prefix=keys.PROJECTOR,
            role="projector",
            params_dtype=params_dtype,
            device=device,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [N, 3, H, W] in [-1, 1] to features [N, tokens, out_width]."""
        x = self.embeddings(images).to(self.params_dtype)
        count, tokens = x.shape[:2]
        x = x.flatten(0, 1)
        update: Tensor | None = None
        for layer in self.layers:
            x, update = layer(x, update, tokens)
        assert update is not None, "the tower has no block"
        features = self.projector(self.post_layernorm.add(update, x)[0])
        return features.view(count, tokens, features.shape[1])
