"""Writing requests and replies to disk, and reading them back.

A recording is a folder with ``exchanges.jsonl``, one JSON object per exchange, and one safetensors
file per exchange with its arrays. In the JSON an array stands as ``{"array": NAME}``, bytes, such
as JPEG pictures, as ``{"bytes": NAME}``, and an array of strings, as its bytes, as
``{"strings": NAME, "dtype": ..., "shape": [...]}``.
"""

import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from phyai.serving.continuation import Continuation
from phyai.serving.jobs import Answer, Job
from phyai.serving.logs import event

INDEX = "exchanges.jsonl"
_BACKLOG = 64
_MARKS = frozenset({"array", "bytes"})
_STRINGS = ("strings", "dtype", "shape")


class RecordingError(ValueError):
    """A recording that can not be read."""


@dataclass(frozen=True)
class Exchange:
    """One recorded request and its reply.

    Attributes:
        index: Position in the recording.
        job: The request, with the seed or the noise that was used.
        actions: float32 [chunk, action_dim] that were sent.
    """

    index: int
    job: Job
    actions: np.ndarray


class Recorder:
    """Writes exchanges in a thread of its own; when the disk is too slow, exchanges are left out.

    Args:
        folder: Is made when it does not exist. A recording that is there already is continued.
        limit: Exchanges that are written at most.

    Raises:
        OSError: The folder can not be made or written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit = folder, limit
        index = folder / INDEX
        self._next = sum(1 for _ in index.open()) if index.is_file() else 0
        self._file = index.open("a", encoding="utf-8")
        self._left_out = 0
        self._queue: queue.Queue[tuple[Job, Answer, float] | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._write_all, name="phyai-recorder", daemon=True)
        self._thread.start()

    def add(self, job: Job, answer: Answer) -> None:
        """Write one exchange soon; never waits."""
        try:
            self._queue.put_nowait((job, answer, time.time()))
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                event("recording is slower than the traffic; exchanges are left out", level=30)

    def close(self) -> None:
        """Write what is still in memory."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._next >= self._limit:
                continue
            try:
                self._write(*item)
            except Exception as error:
                # Whatever it is, this thread must go on: the server waits for it in the end.
                event("recording failed", level=40, error=str(error))

    def _write(self, job: Job, answer: Answer, moment: float) -> None:
        arrays: dict[str, np.ndarray] = {}
        line = {
            "index": self._next,
            "time": moment,
            "request": _take_out(job.request, "request", arrays),
            "num_steps": job.num_steps,
            "seed": job.seed,
            "prompt": answer.prompt,
            "timing_ms": dict(answer.timing_ms),
            "batch": answer.batch,
            "file": f"{self._next:08d}.safetensors",
        }
        if job.noise is not None:
            arrays["noise"] = job.noise
        if job.continues is not None and answer.guided:
            line["continues"] = _take_out(job.continues.to_wire(), "continues", arrays)
        arrays["actions"] = np.ascontiguousarray(answer.actions)
        save_file(arrays, self._folder / line["file"])
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._next += 1


def read_recording(folder: Path) -> Iterator[Exchange]:
    """Yield the exchanges of a recording in order.

    Raises:
        RecordingError: The folder holds none, or a line or file of it is damaged.
    """
    index = folder / INDEX
    if not index.is_file():
        raise RecordingError(f"{folder} holds no recording: {INDEX} is missing")
    with index.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            yield _read(folder, f"{index}:{number}", text)


def _read(folder: Path, where: str, text: str) -> Exchange:
    try:
        line = json.loads(text)
        file = folder / Path(line["file"]).name
        arrays = load_file(file)
        request = _put_back(line["request"], arrays)
        rest = line.get("continues")
        continues = None if rest is None else Continuation.from_wire(_put_back(rest, arrays))
        job = Job(request, line["num_steps"], line["seed"], arrays.get("noise"), continues)
        return Exchange(line["index"], job, arrays["actions"])
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise RecordingError(f"{where} can not be read: {error!r}") from None


def _take_out(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return `value` in JSON types and put its arrays into `arrays`."""
    if isinstance(value, np.ndarray):
        return _take_array(value, name, arrays)
    if isinstance(value, bytes):
        return {"bytes": _store(np.frombuffer(value, np.uint8), name, arrays)}
    if isinstance(value, Mapping):
        return {key: _take_out(item, f"{name}.{key}", arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_out(item, f"{name}.{i}", arrays) for i, item in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


def _take_array(array: np.ndarray, name: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if array.dtype.kind in "SU":
        codes = np.frombuffer(array.tobytes(), np.uint8)
        form = {"dtype": array.dtype.str, "shape": list(array.shape)}
        return {"strings": _store(codes, name, arrays), **form}
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return {"array": _store(np.ascontiguousarray(native).reshape(array.shape), name, arrays)}


def _store(array: np.ndarray, name: str, arrays: dict[str, np.ndarray]) -> str:
    """Put an array under a free name and return that: keys of a request may have dots."""
    while name in arrays:
        name += "'"
    arrays[name] = array
    return name


def _put_back(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_put_back(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("strings")
    if tuple(value) == _STRINGS and isinstance(name, str) and name in arrays:
        codes = arrays[name].tobytes()
        return np.frombuffer(codes, value["dtype"]).reshape(value["shape"])
    mark = next(iter(value)) if len(value) == 1 else None
    if mark in _MARKS and isinstance(value[mark], str) and value[mark] in arrays:
        array = arrays[value[mark]]
        return array if mark == "array" else array.tobytes()
    return {key: _put_back(item, arrays) for key, item in value.items()}
