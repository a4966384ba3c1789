"""From media values to tokens and from tokens to velocities; the time embedding."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.checkpoints.slots import TensorSlot, copy_slot, stored_slot
from phyai.layers import Linear
from phyai.models.cosmos3.blocks import Placement
from phyai.models.cosmos3.config import Cosmos3Config

_FREQUENCIES = 128


def patchify(video: Tensor, patch: int) -> Tensor:
    """Cuts latents [C, T, H, W] into patches of side ``patch``, padded with zeros at the end.

    Returns:
        [T * rows * columns, patch * patch * C]; within a patch row, column, channel.
    """
    channels, frames, height, width = video.shape
    padded = functional.pad(video, (0, -width % patch, 0, -height % patch))
    rows, columns = padded.shape[2] // patch, padded.shape[3] // patch
    cut = padded.view(channels, frames, rows, patch, columns, patch)
    return cut.permute(1, 2, 4, 3, 5, 0).reshape(frames * rows * columns, -1)


def unpatchify(patches: Tensor, shape: Sequence[int], patch: int) -> Tensor:
    """Inverts `patchify` for latents of ``shape`` [C, T, H, W]."""
    channels, frames, height, width = shape
    rows, columns = -(-height // patch), -(-width // patch)
    cut = patches.view(frames, rows, columns, patch, patch, channels)
    padded = cut.permute(5, 0, 1, 3, 2, 4).reshape(channels, frames, rows * patch, columns * patch)
    return padded[:, :, :height, :width]


class TimeEmbedding(nn.Module):
    """Maps a timestep to a vector of the hidden width, in fp32.

    Args:
        config: hidden width and scale of timesteps.
        device: where the weights live.
    """

    linear_1: Linear
    linear_2: Linear

    def __init__(self, config: Cosmos3Config, device: torch.device) -> None:
        super().__init__()
        self.scale: float = config.timestep_scale
        self.linear_1, self.linear_2 = (
            Linear(
                width,
                config.hidden_size,
                bias=True,
                prefix=f"time_embedder.linear_{index}",
                role="head",
                params_dtype=torch.float32,
                device=device,
            )
            for index, width in ((1, 2 * _FREQUENCIES), (2, config.hidden_size))
        )

    def forward(self, timestep: int) -> Tensor:
        """Returns fp32 [1, hidden] for a scheduler's timestep, 0 to 1000."""
        device = self.linear_1.weight.device
        exponents = torch.arange(_FREQUENCIES, dtype=torch.float32, device=device) / _FREQUENCIES
        frequencies = torch.exp(-math.log(10_000) * exponents)
        time = torch.full((1, 1), float(timestep), dtype=torch.float32, device=device)
        angles = time * self.scale * frequencies
        embedding = torch.cat([angles.cos(), angles.sin()], dim=1)
        return self.linear_2(functional.silu(self.linear_1(embedding)))


class DomainTable(nn.Module):
    """One linear layer per embodiment, of which only the served ones are kept, in fp32.

    The checkpoint has ``<name>.fc.weight`` [domains, in * out], each row a matrix [in, out], and
    ``<name>.bias.weight`` [domains, out].

    Args:
        name: of the tables in the checkpoint.
        shape: in and out.
        domains: ids of the served embodiments.
        device: where the tables live.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        domains: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name = name
        self.domains: tuple[int, ...] = tuple(domains)
        count = len(self.domains)
        self.weight, self.bias = (
            nn.Parameter(
                torch.empty(count, *size, dtype=torch.float32, device=device), requires_grad=False
            )
            for size in (shape, shape[1:])
        )

    def forward(self, x: Tensor, domain: int) -> Tensor:
        """Maps ``x`` [T, in] to fp32 [T, out] by the layer of an embodiment.

        Raises:
            ValueError: if the embodiment is not served.
        """
        if domain not in self.domains:
            raise ValueError(
                f"domain_id is {domain}; this model was loaded for {list(self.domains)}: load it "
                "with that domain"
            )
        row = self.domains.index(domain)
        return torch.addmm(self.bias[row], x.float(), self.weight[row])

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields both tables; sources have the served rows only, in the order of ``domains``."""

        def fill(source: Tensor) -> None:
            self.weight.data.copy_(source.view(self.weight.shape))

        flat = (len(self.domains), self.weight.shape[1:].numel())
        yield stored_slot(f"{self.name}.fc.weight", flat, fill)
        yield copy_slot(f"{self.name}.bias.weight", self.bias)


class ModalityEmbedding(nn.Module):
    """A vector that is added to every token of a modality, in fp32.

    Args:
        name: in the checkpoint.
        width: of tokens.
        device: where it lives.
    """

    def __init__(self, name: str, width: int, *, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.weight: nn.Parameter = nn.Parameter(
            torch.empty(width, dtype=torch.float32, device=device), requires_grad=False
        )

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the vector."""
        yield copy_slot(self.name, self.weight)


class ActionHeads(nn.Module):
    """Action rows to tokens and back, by the tables of their embodiment."""

    def __init__(self, config: Cosmos3Config, domains: Sequence[int], device: torch.device) -> None:
        super().__init__()
        width, hidden = config.action_dim, config.hidden_size
        self.proj_in: DomainTable = DomainTable(
            "action_proj_in", (width, hidden), domains=domains, device=device
        )
        self.proj_out: DomainTable = DomainTable(
            "action_proj_out", (hidden, width), domains=domains, device=device
        )
        self.embedding: ModalityEmbedding = ModalityEmbedding(
            "action_modality_embed", hidden, device=device
        )

    def tokens(self, rows: Tensor, domain: int) -> Tensor:
        """Maps rows [rows, action_dim] to fp32 tokens [rows, hidden]."""
        return self.proj_in(rows, domain) + self.embedding.weight

    def velocities(self, tokens: Tensor, domain: int) -> Tensor:
        """Maps tokens [rows, hidden] to fp32 velocities [rows, action_dim]."""
        return self.proj_out(tokens, domain)


class SoundHeads(nn.Module):
    """Sound latents to tokens and back."""

    def __init__(self, config: Cosmos3Config, place: Placement) -> None:
        super().__init__()
        self.proj_in: Linear = head("audio_proj_in", config.sound_dim, config.hidden_size, place)
        self.proj_out: Linear = head("audio_proj_out", config.hidden_size, config.sound_dim, place)
        self.embedding: ModalityEmbedding = ModalityEmbedding(
            "audio_modality_embed", config.hidden_size, device=place.device
        )

    def tokens(self, sound: Tensor, dtype: torch.dtype) -> Tensor:
        """Maps latents [sound_dim, frames] to tokens [frames, hidden] in ``dtype``."""
        return self.proj_in(sound.T.to(dtype)) + self.embedding.weight.to(dtype)

    def velocities(self, tokens: Tensor) -> Tensor:
        """Maps tokens [frames, hidden] to fp32 velocities [sound_dim, frames]."""
        return self.proj_out(tokens).float().T


def head(name: str, in_features: int, out_features: int, place: Placement) -> Linear:
    """Returns a biased linear layer in the model's dtype, held whole by every rank."""
    return Linear(
        in_features,
        out_features,
        bias=True,
        prefix=name,
        role="head",
        params_dtype=place.dtype,
        device=place.device,
    )
