"""Reads arrays of a checkpoint that Orbax wrote, without JAX."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai.checkpoints.errors import CheckpointError

_ARRAY_FILES = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
_MANIFEST = "manifest.ocdbt"


class OrbaxReader:
    """The arrays of an Orbax folder whose values lie in one OCDBT database.

    Args:
        directory: the item's folder, such as ``params``; it holds ``manifest.ocdbt``.

    Attributes:
        names: name of each array as Orbax spells it: the keys of the tree joined with dots.

    Raises:
        CheckpointError: if the folder is something else, or tensorstore is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory: Path = Path(directory)
        if not (self.directory / _MANIFEST).is_file():
            raise CheckpointError(
                f"{directory} has no {_MANIFEST}; expected the folder of an Orbax item, which "
                "openpi calls params"
            )
        self._store = _tensorstore()
        self._base = {"driver": "ocdbt", "base": f"file://{self.directory.resolve()}/"}
        self._drivers: dict[str, str] = {}
        for key in self._keys():
            for ending, driver in _ARRAY_FILES.items():
                if key.endswith(ending):
                    self._drivers[key.removesuffix(ending)] = driver
        self.names: list[str] = sorted(self._drivers)

    def _keys(self) -> list[str]:
        try:
            found = self._store.KvStore.open(self._base).result().list().result()
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory} is not a complete OCDBT database ({error}); copy it again"
            ) from error
        return [key.decode() for key in found]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array without reading its values."""
        return tuple(self._open(name).shape)

    def get(self, name: str) -> Tensor:
        """Reads one array.

        Raises:
            CheckpointError: if values are missing, or of a kind that PyTorch does not have.
        """
        try:
            values = self._open(name).read().result()
        except ValueError as error:
            raise CheckpointError(f"{self.directory}: {name} cannot be read ({error})") from error
        if str(values.dtype) == "bfloat16":
            return torch.from_numpy(values.view("uint16")).view(torch.bfloat16)
        try:
            return torch.from_numpy(values)
        except TypeError as error:
            raise CheckpointError(f"{self.directory}: {name} has dtype {values.dtype}") from error

    def _open(self, name: str) -> Any:
        spec = {"driver": self._drivers[name], "kvstore": self._base | {"path": f"{name}/"}}
        return self._store.open(spec, open=True).result()


def _tensorstore() -> Any:
    try:
        return importlib.import_module("tensorstore")
    except ImportError as error:
        raise CheckpointError(
            "reading Orbax checkpoints needs tensorstore; install it: "
            'pip install "phyai-engine[orbax]"'
        ) from error
