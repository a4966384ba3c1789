"""Imports modules from one folder, as if some packages were not installed; run as a program.

python -P import_alone.py FOLDER MODULE,... [ABSENT...]
"""

import importlib
import sys
from collections.abc import Sequence


class Absent:
    """Finds nothing and refuses what is absent."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse an absent package."""
        del path, target
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def check_rounding() -> None:
    """Round quarters: on average they stay what they are, and a seed gives the same again."""
    import torch

    stochastic = importlib.import_module("piper_kernels.stochastic_quantization")
    values = torch.full((2**14,), 0.25)

    def rounded(seed: int) -> torch.Tensor:
        nearest = values.round().to(torch.int64)
        bounds = {"quant_min": -128, "quant_max": 127}
        return stochastic.stochastic_round_to_int(
            values, seed=seed, deterministic=nearest, **bounds
        )

    first = rounded(7)
    assert set(first.tolist()) == {0, 1}
    assert abs(first.double().mean() - 0.25) < 0.02
    assert torch.equal(first, rounded(7))
    assert not torch.equal(first, rounded(8))


def main(folder: str, modules: str, *absent: str) -> None:
    """Import and check."""
    sys.meta_path.insert(0, Absent(absent))  # pyright: ignore[reportArgumentType]
    sys.path.insert(0, folder)
    for name in modules.split(","):
        file = importlib.import_module(name).__file__
        assert file is not None
        assert file.startswith(folder), file
    if modules == "piper_kernels":
        check_rounding()
    assert not {name.partition(".")[0] for name in sys.modules} & set(absent)


if __name__ == "__main__":
    main(*sys.argv[1:])
