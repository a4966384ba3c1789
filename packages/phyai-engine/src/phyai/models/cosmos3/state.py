"""What is denoised and how it is laid out: the shared vocabulary of model, sampler and modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Modalities:
    """One request's values in fp32, without a batch axis: samples, noise or velocities.

    Attributes:
        video: latents [C, T, H, W].
        action: rows [rows, action_dim], or None.
        sound: latents [sound_dim, frames], or None.
    """

    video: Tensor
    action: Tensor | None = None
    sound: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """Video, action and sound, as far as they are there."""
        every = (self.video, self.action, self.sound)
        return [part for part in every if part is not None]

    def map(self, function: Callable[..., Tensor], *others: Modalities) -> Modalities:
        """Applies ``function`` to each modality of this and of ``others`` that is there."""

        def apply(*parts: Tensor | None) -> Tensor | None:
            return None if parts[0] is None else function(*parts)

        everyone = (self, *others)
        return Modalities(
            function(*(one.video for one in everyone)),
            apply(*(one.action for one in everyone)),
            apply(*(one.sound for one in everyone)),
        )


@dataclass(frozen=True)
class ActionLayout:
    """The action rows of a request.

    Attributes:
        rows: number of rows, state and history rows included.
        start: temporal position of the first row: 1 without a state row, 0 with one, ``1 - h`` or
            ``-h`` with ``h`` history rows.
        clean_rows: rows that are given, ascending; the others are denoised.
        raw_dim: channels that the robot has; those behind are zero.
        domain_id: embodiment, the row of the action tables.

    Raises:
        ValueError: for no rows, a clean row that does not exist, or no channels.
    """

    rows: int
    start: int
    clean_rows: tuple[int, ...]
    raw_dim: int
    domain_id: int

    def __post_init__(self) -> None:
        for name in ("rows", "raw_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.domain_id < 0:
            raise ValueError(f"domain_id is {self.domain_id}; it must not be negative")
        object.__setattr__(self, "clean_rows", _indices("clean_rows", self.clean_rows, self.rows))


@dataclass(frozen=True)
class Layout:
    """The grid of a request; the key of position tables and of CUDA graphs.

    Attributes:
        frames: latent video frames.
        height: latent rows.
        width: latent columns.
        clean_frames: latent frames that are given, ascending; the others are denoised.
        fps: pixel frames per second; None numbers frames instead of timing them.
        action: the action rows, or None.
        sound_frames: sound latents, 0 for none. All of them are denoised.

    Raises:
        ValueError: for an empty grid, a clean frame that does not exist, or an fps of 0 or less.
    """

    frames: int
    height: int
    width: int
    clean_frames: tuple[int, ...] = ()
    fps: float | None = None
    action: ActionLayout | None = None
    sound_frames: int = 0

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sound_frames < 0:
            raise ValueError(f"sound_frames is {self.sound_frames}; it must not be negative")
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise ValueError(f"fps is {self.fps}; it must be a positive number or None")
        clean = _indices("clean_frames", self.clean_frames, self.frames)
        object.__setattr__(self, "clean_frames", clean)

    @property
    def noisy_frames(self) -> tuple[int, ...]:
        """Latent frames that are denoised."""
        return tuple(i for i in range(self.frames) if i not in self.clean_frames)

    @property
    def noisy_rows(self) -> tuple[int, ...]:
        """Action rows that are denoised."""
        if self.action is None:
            return ()
        return tuple(i for i in range(self.action.rows) if i not in self.action.clean_rows)

    def shapes(
        self, channels: int, action_dim: int, sound_dim: int
    ) -> dict[str, tuple[int, ...] | None]:
        """Returns the shape of each of the `Modalities` by name, None for those that are absent.

        Args:
            channels: of the video latents.
            action_dim: columns of an action row.
            sound_dim: channels of a sound latent.
        """
        return {
            "video": (channels, self.frames, self.height, self.width),
            "action": None if self.action is None else (self.action.rows, action_dim),
            "sound": (sound_dim, self.sound_frames) if self.sound_frames else None,
        }

    def grid(self, patch: int) -> tuple[int, int, int]:
        """Returns frames, rows and columns of patches of side ``patch``; sides are padded up."""
        return self.frames, -(-self.height // patch), -(-self.width // patch)

    def tokens(self, patch: int) -> int:
        """Returns the number of generation tokens with patches of side ``patch``."""
        frames, rows, columns = self.grid(patch)
        actions = 0 if self.action is None else self.action.rows
        return frames * rows * columns + actions + self.sound_frames


@dataclass(frozen=True, eq=False)
class Conditions:
    """What the generation tower sees of one text: the understanding tower's keys and values.

    Attributes:
        keys: [layers, length, kv_heads, head_dim], normalised and rotated.
        values: likewise.
    """

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        """Text tokens; media positions start behind them."""
        return self.keys.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(part.numel() * part.element_size() for part in (self.keys, self.values))


def _indices(name: str, indices: Iterable[int], count: int) -> tuple[int, ...]:
    found = tuple(sorted(set(indices)))
    if found and not 0 <= found[0] <= found[-1] < count:
        raise ValueError(f"{name} is {found}; allowed: 0 to {count - 1}")
    return found
