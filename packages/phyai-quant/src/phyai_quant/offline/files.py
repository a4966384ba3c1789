"""The safetensors files of a checkpoint folder, read by row ranges without mapping them."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from phyai_quant.scheme import QuantConfigError
from piper_kernels.weights.io import StoredTensor, WeightFileError, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""Names that safetensors headers use, and the dtypes behind them."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        file: The shard that holds it.
        stored: Its dtype name, shape and byte range.
    """

    file: Path
    stored: StoredTensor

    @property
    def dtype(self) -> str:
        """Name of the dtype in the safetensors format, such as ``BF16``."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape."""
        return self.stored.shape

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.stored.end - self.stored.start

    def read(self) -> torch.Tensor:
        """Reads the whole tensor into memory of its own; errors as `read_rows`."""
        return self._read(0, math.prod(self.shape)).view(self.shape)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Reads rows ``start`` to ``stop`` of a tensor with at least one axis.

        Raises:
            QuantConfigError: The dtype has no counterpart in torch, or the file became shorter.
        """
        width = math.prod(self.shape[1:])
        return self._read(start * width, stop * width).view(stop - start, *self.shape[1:])

    def _read(self, start: int, stop: int) -> torch.Tensor:
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise QuantConfigError(
                f"{self.file}: a tensor has dtype {self.dtype}; readable: {', '.join(DTYPES)}"
            )
        if start == stop:
            return torch.empty(0, dtype=dtype)
        data = bytearray((stop - start) * dtype.itemsize)
        view = memoryview(data)
        # Plain reads: pages of a mapped file would count as memory of this process.
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.stored.start + start * dtype.itemsize)
            while view:
                count = file.readinto(view)
                if not count:
                    raise QuantConfigError(f"{self.file}: ends before its tensors do")
                view = view[count:]
        return torch.frombuffer(data, dtype=dtype)


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Something wrong with the files of a checkpoint.

    Attributes:
        place: The file, or the tensor.
        message: What was seen.
        fatal: False when readers get along with it.
    """

    place: str
    message: str
    fatal: bool = True


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder; contents are not read.

    Attributes:
        directory: The folder.
        shards: Its safetensors files in order of their names.
        tensors: Every tensor by name, in the order of the files.
        metadata: Header entries of each shard, by file name.
        problems: What is wrong with the files; empty for a sound checkpoint.
    """

    directory: Path
    shards: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    metadata: dict[str, dict[str, str]]
    problems: tuple[FileProblem, ...]

    def require_sound(self) -> "Checkpoint":
        """Returns itself; QuantConfigError listing the fatal problems of the files."""
        fatal = [f"{item.place}: {item.message}" for item in self.problems if item.fatal]
        if fatal:
            raise QuantConfigError("the checkpoint is damaged:\n  " + "\n  ".join(fatal[:20]))
        return self

    def names_of(self, shard: Path) -> list[str]:
        """Returns the tensors of one shard, in file order."""
        found = [name for name, entry in self.tensors.items() if entry.file == shard]
        return sorted(found, key=lambda name: self.tensors[name].stored.start)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


def read_checkpoint(directory: str | Path) -> Checkpoint:
    """Reads the index and the headers of a checkpoint folder.

    The shards are the files that the index lists; without an index ``model.safetensors``, beside
    which other files hold something else (normalisation statistics); else all safetensors files.

    Damage is recorded in `Checkpoint.problems`, so that a report can list all of it.

    Raises:
        QuantConfigError: The folder does not exist or holds no safetensors file.
    """
    root = Path(directory)
    if not root.is_dir():
        raise QuantConfigError(f"{root}: is no folder; give the folder of a checkpoint")
    problems: list[FileProblem] = []
    weight_map = _read_index(root / INDEX_FILE, problems)
    present = sorted(path for path in root.glob("*.safetensors") if path.is_file())
    shards = [path for path in present if path.name == SINGLE_FILE] or present
    if weight_map is not None:
        listed = sorted({root / name for name in weight_map.values()})
        missing = (path.name for path in listed if path not in present)
        problems += [FileProblem(name, f"listed in {INDEX_FILE} but missing") for name in missing]
        problems += _unlisted(path.name for path in present if path not in listed)
        shards = [path for path in listed if path in present]
    if not shards and not problems:
        raise QuantConfigError(
            f"{root}: holds no .safetensors file; convert other formats to safetensors first"
        )
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, dict[str, str]] = {}
    damaged = {
        shard.name for shard in shards if not _read_shard(shard, tensors, metadata, problems)
    }
    _check_index(weight_map or {}, tensors, damaged, problems)
    return Checkpoint(root, tuple(shards), tensors, metadata, tuple(problems))


def _read_shard(
    shard: Path,
    tensors: dict[str, TensorEntry],
    metadata: dict[str, dict[str, str]],
    problems: list[FileProblem],
) -> bool:
    try:
        header = read_header(shard)
    except (WeightFileError, OSError) as error:
        problems.append(FileProblem(shard.name, str(error).removeprefix(f"{shard}: ")))
        return False
    metadata[shard.name] = header.metadata
    for name, stored in header.tensors.items():
        if name in tensors:
            first = tensors[name].file.name
            problems.append(FileProblem(name, f"stored twice: in {first} and {shard.name}"))
            continue
        tensors[name] = TensorEntry(shard, stored)
    return True


def _check_index(
    weight_map: dict[str, str],
    tensors: dict[str, TensorEntry],
    damaged: set[str],
    problems: list[FileProblem],
) -> None:
    for name, file in weight_map.items():
        entry = tensors.get(name)
        if entry is None and file not in damaged:
            problems.append(FileProblem(name, f"{INDEX_FILE} places it in {file}, which lacks it"))
        elif entry is not None and entry.file.name != file:
            message = f"{INDEX_FILE} places it in {file}, but {entry.file.name} holds it"
            problems.append(FileProblem(name, message))
    if weight_map:
        problems += _unlisted(name for name in tensors if name not in weight_map)


def _unlisted(names: Iterable[str]) -> list[FileProblem]:
    return [FileProblem(name, f"not listed in {INDEX_FILE}", fatal=False) for name in names]


def _read_index(file: Path, problems: list[FileProblem]) -> dict[str, str] | None:
    if not file.is_file():
        return None
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        weight_map = data["weight_map"]
        valid = all(isinstance(v, str) and Path(v).name == v for v in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(FileProblem(file.name, f"is no index with a weight_map: {error!r}"))
        return None
    if not valid:
        problems.append(FileProblem(file.name, "weight_map must map tensors to file names"))
        return None
    return weight_map
