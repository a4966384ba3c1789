"""Steps between the resolutions: convolutions and the shortcuts around whole blocks."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.checkpoints.slots import TensorSlot, stored_slot
from phyai.models.cosmos3.vae.config import Factors
from phyai.models.cosmos3.vae.convs import TAPS, Build, TimeWeight, conv2d, conv_time
from phyai.models.cosmos3.vae.spread import spread
from phyai.models.cosmos3.vae.stream import Stream


class DownSpace(nn.Module):
    """3 x 3 convolution with stride 2; zeros below and to the right.

    Args:
        width: channels.
        prefix: stored name.
        build: of the model.
    """

    def __init__(self, width: int, *, prefix: str, build: Build) -> None:
        super().__init__()
        self.prefix = prefix
        self.stored: tuple[int, int, int, int] = (width, width, 3, 3)
        self.weight: nn.Parameter = build.zeros(*self.stored)
        self.bias: nn.Parameter = build.zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [T, 2H, 2W, C] to [T, H, W, C]."""
        padded = functional.pad(x, (0, 0, 0, 1, 0, 1))
        return conv2d(padded, self.weight, self.bias, stride=2, padding=0)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields weight and bias."""
        yield stored_slot(f"{self.prefix}.weight", self.stored, self.weight.data.copy_)
        yield stored_slot(f"{self.prefix}.bias", self.stored[:1], self.bias.data.copy_)


# Row u, column y: whether tap y of a kernel over doubled rows falls on row u of the two that it
# sees, for output rows with an even and an odd index.
_FOLDS = torch.tensor([[[1.0, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]])


class UpSpace(nn.Module):
    """Doubles rows and columns by repetition, convolves 3 x 3 and adds a decoder block's input.

    Taps that fall on copies of one cell are summed when loaded: each of the four outputs of a cell
    is a 2 x 2 convolution of the small map, 4/9 of the products.

    Args:
        width: channels.
        factors: frames, rows and columns that the block makes of one of its input.
        prefix: stored name.
        build: of the model.
    """

    def __init__(self, width: int, factors: Factors, *, prefix: str, build: Build) -> None:
        super().__init__()
        self.prefix = prefix
        self.stored: tuple[int, int, int, int] = (width, width, 3, 3)
        self.factors = factors
        self.weight: nn.Parameter = build.zeros(4 * width, width, 2, 2)
        self.bias: nn.Parameter = build.zeros(width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """Maps [T, H, W, C] to [T, 2H, 2W, C].

        Args:
            x: what the block computed.
            source: what it was given, before its frames were multiplied.
        """
        # [T, H + 1, W + 1, (row parity, column parity, C)]
        phases = conv2d(x, self.weight, None, stride=1, padding=1)
        return spread(phases, self.bias, source, self.factors)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields weight and bias."""

        def fill(source: Tensor) -> None:
            folds = _FOLDS.to(source.device)
            folded = torch.einsum("oiyx,auy,bvx->aboiuv", source.float(), folds, folds)
            self.weight.data.copy_(folded.flatten(0, 2))

        yield stored_slot(f"{self.prefix}.weight", self.stored, fill)
        yield stored_slot(f"{self.prefix}.bias", self.stored[:1], self.bias.data.copy_)


class DownTime(TimeWeight):
    """Halves the frames of every chunk but the first, which passes unchanged.

    Args:
        width: channels.
        prefix: stored name.
        build: of the model.
    """

    def __init__(self, width: int, *, prefix: str, build: Build) -> None:
        super().__init__(width, width, 1, prefix=prefix, build=build)

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Maps [2T, H, W, C] to [T, H, W, C], or returns the one frame of a first chunk."""
        if stream is None:
            return x
        last = stream.get(self)
        stream.put(self, x[-1:])
        if last is None:
            return x
        return conv_time(torch.cat((last, x)), self.weight, self.bias, stride=2, padding=0)


class UpTime(TimeWeight):
    """Doubles the frames of every chunk but the first, which passes unchanged and is forgotten.

    Args:
        width: channels.
        prefix: stored name.
        build: of the model.
    """

    def __init__(self, width: int, *, prefix: str, build: Build) -> None:
        super().__init__(width, 2 * width, 1, prefix=prefix, build=build)

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Maps [T, H, W, C] to [2T, H, W, C], or returns the one frame of a first chunk."""
        if stream is None:
            return x
        history = stream.get(self)
        if history is None:
            stream.put(self, x[:0])
            return x
        if len(history) == 0:
            history = x.new_zeros(TAPS - 1, *x.shape[1:])
        seen = torch.cat((history, x))
        stream.put(self, seen[1 - TAPS :])
        frames, rows, columns, width = x.shape
        pairs = conv_time(seen, self.weight, self.bias, padding=0)
        pairs = pairs.view(frames, rows, columns, 2, width).permute(0, 3, 1, 2, 4)
        return pairs.reshape(2 * frames, rows, columns, width)


def merged(x: Tensor, factors: Factors, width: int) -> Tensor:
    """Averages cells of an encoder block's input into the shape of its output.

    Cells are gathered into channels (channel, frame, row, column), of which each output channel
    averages an equal share; frames that the first cell lacks are zeros.

    Args:
        x: [T, H, W, C].
        factors: frames, rows and columns of a cell.
        width: channels of the output.
    """
    time, rows, columns = factors
    missing = -x.shape[0] % time
    if missing:
        x = torch.cat((x.new_zeros(missing, *x.shape[1:]), x))
    frames, height, broad, channels = x.shape
    cells = x.view(frames // time, time, height // rows, rows, broad // columns, columns, channels)
    means = cells.mean((3, 5)) if rows * columns > 1 else cells[:, :, :, 0, :, 0]
    gathered = means.permute(0, 2, 3, 4, 1).flatten(3)  # [T', H', W', C * time]
    share = gathered.shape[-1] // width
    return gathered.unflatten(-1, (width, share)).mean(-1) if share > 1 else gathered
