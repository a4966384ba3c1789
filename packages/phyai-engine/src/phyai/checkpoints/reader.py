"""Reads tensors and their shapes from one or several safetensors files."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phyai.checkpoints.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # of the safetensors format
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def _weight_files(directory: Path, stem: str) -> list[Path]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; pass the checkpoint's folder")
    index = directory / f"{stem}.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error})") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index}: {name!r} is not a file name in this folder")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    single = directory / f"{stem}.safetensors"
    if single in files:
        return [single]
    pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
    hint = (
        f"; found {', '.join(pickled)}, which are pickles and are never loaded: "
        "convert them to safetensors"
        if pickled
        else ""
    )
    raise CheckpointError(f"{directory} has no {single.name} and no {index.name}{hint}")


def _refuse_duplicate_names(path: Path) -> None:
    """Raises if a key stands twice in the header, of which other readers take one or the other."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(
                f"{path} has the duplicate key {twice!r} in its header; write the file again with "
                "one tensor of each name"
            )
        return found

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    # What else is wrong with a header is said by who opens the file.
    with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        json.loads(header, object_pairs_hook=unique)


class CheckpointReader:
    """The tensors of a checkpoint folder under canonical names.

    Args:
        directory: folder with ``<stem>.safetensors`` or an index of shards.
        canonical: maps a stored name to the model's name, or to None to leave it out.
        stem: name of the weight file, or of the shards' index, before ``.safetensors``.

    Attributes:
        shapes: shape of each tensor by canonical name.
        dtypes: safetensors dtype string of each tensor (``F32``, ``BF16``, ``F8_E4M3``, ...).
        ignored: stored names that ``canonical`` left out.

    Raises:
        CheckpointError: for missing, truncated or contradictory files and duplicate names.
    """

    def __init__(
        self,
        directory: Path,
        canonical: Callable[[str], str | None] = lambda name: name,
        *,
        stem: str = "model",
    ) -> None:
        self.directory: Path = Path(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.ignored: list[str] = []
        self._stored: dict[str, tuple[Path, str]] = {}
        for path in _weight_files(self.directory, stem):
            self._scan(path, canonical)

    def _scan(self, path: Path, canonical: Callable[[str], str | None]) -> None:
        try:
            _refuse_duplicate_names(path)
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118 - not a mapping
                    name = canonical(stored)
                    if name is None:
                        self.ignored.append(stored)
                        continue
                    if name in self._stored:
                        raise CheckpointError(
                            f"{path.name}: {stored} and {self._stored[name][1]} "
                            f"are both the tensor {name}"
                        )
                    view = file.get_slice(stored)
                    self.shapes[name] = tuple(view.get_shape())
                    self.dtypes[name] = view.get_dtype()
                    self._stored[name] = (path, stored)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is named by the index of shards but does not exist"
            ) from error
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file ({error}); copy it again"
            ) from error

    def get(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Returns one tensor, copied from the mapped file straight to ``device``."""
        path, stored = self._stored[name]
        with safe_open(path, framework="pt", device=str(device)) as file:
            return file.get_tensor(stored)

    def get_rows(
        self, name: str, rows: Sequence[int], device: torch.device | str = "cpu"
    ) -> Tensor:
        """Returns the given rows of one tensor, [len(rows), ...]; no other row is read."""
        path, stored = self._stored[name]
        with safe_open(path, framework="pt", device=str(device)) as file:
            view = file.get_slice(stored)
            return torch.cat([view[row : row + 1] for row in rows])

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes that the tensors stand for.

        A weight that is packed several values to an element has the shape ``(N, K)`` of the dense
        one, under the name ``weight``.

        Raises:
            CheckpointError: if a weight in 32-bit words has no usable ``weight_shape`` beside it.
        """
        shapes = dict(self.shapes)
        for name, shape in self.shapes.items():
            layer, _, tensor = name.rpartition(".")
            if tensor in ("weight", "weight_packed") and len(shape) == 2:
                shapes[f"{layer}.weight"] = self._unpacked(layer, name, shape)
        return shapes

    def _unpacked(self, layer: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        dtype = self.dtypes[name]
        if dtype == "U8":
            return shape[0], 2 * shape[1]
        if dtype != "I32":
            return shape
        declared = f"{layer}.weight_shape"
        if self.shapes.get(declared) != (2,):
            raise CheckpointError(
                f"{name} holds 32-bit words, and the checkpoint has no tensor {declared} [2] that "
                "tells the shape of the weight; quantize the checkpoint again"
            )
        rows, columns = self.get(declared).tolist()
        return int(rows), int(columns)

    def tensors(self, device: torch.device | str = "cpu") -> Mapping[str, Callable[[], Tensor]]:
        """Returns a reader to ``device`` for each tensor, opening each file only when asked."""
        return {name: lambda name=name: self.get(name, device) for name in self._stored}

    def bytes_on_disk(self) -> int:
        """Returns the size of the weight files in bytes."""
        return sum(path.stat().st_size for path in {path for path, _ in self._stored.values()})
