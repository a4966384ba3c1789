"""Writes a safetensors file piece by piece, without holding its tensors."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from phyai_quant.offline.files import DTYPE_NAMES

PARTIAL_SUFFIX = ".partial"
"""Ending of a shard that is still being written."""

TensorInfo = tuple[torch.dtype, tuple[int, ...]]


class ShardWriter:
    """A safetensors file whose tensors are appended in pieces, in any order between tensors.

    The file takes its name when the context ends without an error; until then, and after an error,
    it carries `PARTIAL_SUFFIX`.

    Args:
        path: The file to write.
        tensors: Dtype and shape of every tensor.
        metadata: Header entries.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
    ) -> None:
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._position: dict[str, int] = {}
        self._end: dict[str, int] = {}
        self._header = self._lay_out(tensors, metadata)
        self._file: BinaryIO | None = None

    def _lay_out(self, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
        # Wider elements first, as the reference writer does, so that all of them are aligned.
        order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name in order:
            dtype, shape = tensors[name]
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            self._position[name], self._end[name] = offset, end
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb")
        self._file.write(self._header)
        return self

    def append(self, name: str, piece: torch.Tensor) -> None:
        """Writes the next elements of a tensor; any device, any strides.

        Raises:
            RuntimeError: The tensor is full already: its layout and its pieces disagree.
        """
        if self._file is None:
            raise RuntimeError("the writer is used outside of its context")
        data = piece.detach().to("cpu").contiguous().reshape(-1)
        if data.numel() == 0:
            return
        raw = data.view(torch.uint8).numpy()
        start = self._position[name]
        if start + raw.nbytes > self._end[name]:
            raise RuntimeError(f"{name}: more elements than its shape holds")
        self._file.seek(len(self._header) + start)
        self._file.write(raw.data)
        self._position[name] = start + raw.nbytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        if kind is not None:
            return
        short = [name for name, end in self._end.items() if self._position[name] != end]
        if short:
            raise RuntimeError(f"{', '.join(short)}: fewer elements than the shape asks for")
        self._partial.replace(self._path)
