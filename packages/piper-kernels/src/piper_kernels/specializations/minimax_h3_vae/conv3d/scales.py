"""Fixed activation scales of the encoder's convolutions: names, table and file."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from torch import nn

QUANTILE = 0.995
FORMAT = "piper-kernels activation scales"
VERSION = 1
_SMALL_CHANNELS = 128

CONVOLUTIONS: tuple[str, ...] = (
    *(
        f"down_blocks.{block}.resnets.{resnet}.conv{conv}"
        for block in range(6)
        for resnet in range(2)
        for conv in (1, 2)
    ),
    *(f"down_blocks.{block}.downsamplers.0.conv" for block in range(4)),
    "conv_out",
)
"""The encoder's 29 quantized convolutions. That of RGB and the 1x1 shortcuts stay as they are."""


def default_group_size(channels: int) -> int:
    """Return the rotation group of a convolution: 64 up to 128 input channels, else 256."""
    return 64 if channels <= _SMALL_CHANNELS else 256


def checked_quantile(quantile: float) -> float:
    """Return a quantile.

    Raises:
        ValueError: It is not in (0, 1].
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile must be in (0, 1], got {quantile}")
    return quantile


def require_module(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return a module by name.

    Raises:
        KeyError: There is none.
    """
    if name not in modules:
        near = [known for known in modules if known.endswith(name.rpartition(".")[2])]
        raise KeyError(
            f"the model has no module {name!r}; it has {near[:8]}. Pass the encoder itself, or the "
            "names of its convolutions"
        )
    return modules[name]


class ActivationScales(Mapping[str, float]):
    """An immutable table of activation scales by the name of a convolution.

    Args:
        scales: Finite and positive scales.
        quantile: The quantile of token magnitudes that they stand for.

    Raises:
        ValueError: A scale is not finite and positive, or the quantile is not in (0, 1].
    """

    def __init__(
        self, scales: Mapping[str, float] | None = None, *, quantile: float = QUANTILE
    ) -> None:
        self._scales = {name: float(scale) for name, scale in (scales or {}).items()}
        wrong = {n: s for n, s in self._scales.items() if not (math.isfinite(s) and s > 0)}
        if wrong:
            raise ValueError(f"activation scales must be finite and positive, got {wrong}")
        self.quantile: float = checked_quantile(quantile)

    def __getitem__(self, name: str) -> float:
        """Return the scale of a convolution.

        Raises:
            KeyError: There is none; the message says how to make one.
        """
        if name in self._scales:
            return self._scales[name]
        known = "the table is empty" if not self._scales else f"it has {sorted(self._scales)}"
        raise KeyError(
            f"no activation scale for {name!r}: {known}. Scales belong to one checkpoint and none "
            "is shipped; measure them with calibrate_activation_scales(model, batches), keep them "
            "with .save(path) and pass ActivationScales.load(path)"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._scales)

    def __len__(self) -> int:
        return len(self._scales)

    def __repr__(self) -> str:
        return f"ActivationScales({self._scales}, quantile={self.quantile})"

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        table = {"format": FORMAT, "version": VERSION, "quantile": self.quantile}
        text = json.dumps(table | {"scales": self._scales}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a table that :meth:`save` wrote.

        Raises:
            ValueError: The file is no such table, or its scales are not finite and positive.
        """
        try:
            table = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        header = (FORMAT, VERSION)
        found = (table.get("format"), table.get("version")) if isinstance(table, dict) else None
        if found != header:
            raise ValueError(f"{path} must have format and version {header}, got {found}")
        scales = table.get("scales")
        if not isinstance(scales, dict) or not all(
            isinstance(scale, int | float) and not isinstance(scale, bool)
            for scale in scales.values()
        ):
            raise ValueError(f"{path} must have an object of numbers under 'scales'")
        return cls(scales, quantile=table.get("quantile", QUANTILE))


P995_ACTIVATION_SCALES = ActivationScales()
"""The shipped table: empty, because scales belong to a checkpoint; see ``ActivationScales``."""

P995_INPUT_SCALES = P995_ACTIVATION_SCALES
"""Another name of ``P995_ACTIVATION_SCALES``."""
