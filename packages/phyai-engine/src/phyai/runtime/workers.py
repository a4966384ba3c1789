"""Processes that compute one request together, one device each."""

import contextlib
import copy
import dataclasses
import gc
import multiprocessing
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Ranks answer within moments of each other, but a busy machine may not let them.
_GRACE_S = 60.0
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# How long the parent waits for a process to end, and a process for its group to close.
_END_S = 2.0
_LEAVE_S = 1.5


class WorkerError(RuntimeError):
    """A process that computes ended, or lost step with the others."""


class Workers:
    """A process group in which every rank holds one object and runs the same calls.

    The processes are spawned, so a script that makes them must be guarded by
    ``if __name__ == "__main__":``.

    Args:
        ranks: number of processes.
        make: called as ``make(rank, *arguments)`` in each process once the group exists; a
            function of a module, like all arguments.
        arguments: for ``make``.
        backend: of ``torch.distributed``: ``gloo`` on the CPU, ``nccl`` on NVIDIA GPUs.

    Raises:
        WorkerError: if a process ends while it starts.
        Exception: what ``make`` raised.
    """

    def __init__(
        self, ranks: int, make: Callable[..., Any], *arguments: Any, backend: str = "gloo"
    ) -> None:
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="phyai-ranks-")
        self._problem = ""
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        store = str(Path(self._folder.name) / "store")
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work,
                    args=(rank, ranks, backend, store, theirs, make, arguments),
                    name=f"phyai-rank-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
            self._collect()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the object of every rank and returns what rank 0 returned.

        Tensors travel as arrays of the host, inside tuples, lists, dicts and dataclasses too.

        Raises:
            WorkerError: if a process ended or lost step; further calls raise it too.
            Exception: what the method raised on all ranks; they can be called again.
        """
        with self._lock:
            if self._problem:
                raise WorkerError(self._problem)
            message = (method, _pack(arguments), _pack(options))
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send(message)
                except OSError:
                    raise self._broken(f"rank {rank} has ended") from None
            return self._collect()

    def close(self) -> None:
        """Ends the processes."""
        self._problem = self._problem or "the workers are closed"
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _collect(self) -> Any:
        """Waits for every rank's answer; returns or raises that of the lowest rank."""
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < len(self._processes):
            missing = [rank for rank in range(len(self._processes)) if rank not in answers]
            handles = [self._connections[rank] for rank in missing]
            failed = any(kind == "error" for kind, _ in answers.values())
            ready = wait(handles, timeout=_GRACE_S if failed else None)
            if not ready:
                first = next(error for kind, error in answers.values() if kind == "error")
                raise self._broken(f"rank {missing[0]} hangs after another failed") from first
            for rank in missing:
                if self._connections[rank] in ready:
                    answers[rank] = self._receive(rank)
        for rank in sorted(answers):
            kind, value = answers[rank]
            if kind == "error":
                raise value
        return _unpack(answers[0][1])

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_GRACE_S)
            raise self._broken(
                f"rank {rank} ended with exit code {process.exitcode}; its message is above. A "
                'script that uses several ranks needs the guard if __name__ == "__main__":'
            ) from None

    def _broken(self, problem: str) -> WorkerError:
        self._problem = problem
        for process in self._processes:
            process.kill()
        return WorkerError(problem)


def _work(
    rank: int,
    ranks: int,
    backend: str,
    store: str,
    connection: Connection,
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Serves calls until the other end of the pipe is closed."""
    if backend == "gloo":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    held: list[Any] = []
    _answer(connection, rank, lambda: held.append(make(rank, *arguments)))
    if held and _serve(connection, rank, held[0]):
        _leave(held)


def _serve(connection: Connection, rank: int, computes: Any) -> bool:
    """Answers calls until the pipe ends; tells whether its other end was closed."""
    with contextlib.suppress(OSError, KeyboardInterrupt):
        while True:
            try:
                method, positional, named = connection.recv()
            except EOFError:
                return True
            function = getattr(computes, method)
            packed = (_unpack(positional), _unpack(named))
            _answer(connection, rank, lambda f=function, p=packed: f(*p[0], **p[1]))
    return False


def _leave(held: list[Any]) -> None:
    """Closes the process group, or ends the process where that takes too long.

    Communicators wait for the graphs that captured them, so what is held goes first.
    """
    watchdog = threading.Timer(_LEAVE_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    held.clear()
    gc.collect()
    dist.destroy_process_group()
    watchdog.cancel()


def _answer(connection: Connection, rank: int, function: Callable[[], Any]) -> None:
    try:
        value = function()
        connection.send(("value", _pack(value) if rank == 0 else None))
    except Exception as error:
        error.add_note(f"on rank {rank}:\n{''.join(traceback.format_exception(error))}")
        try:
            connection.send(("error", error))
        except Exception:
            connection.send(("error", WorkerError(f"{type(error).__name__}: {error}")))


@dataclasses.dataclass(frozen=True, eq=False)
class _Packed:
    array: np.ndarray


def _pack(value: Any) -> Any:
    """Replaces tensors by arrays: sharing memory between processes is not worth its dangers."""
    return _convert(
        value,
        lambda item: _Packed(item.detach().cpu().numpy()) if isinstance(item, Tensor) else item,
    )


def _unpack(value: Any) -> Any:
    return _convert(
        value, lambda item: torch.from_numpy(item.array) if isinstance(item, _Packed) else item
    )


def _convert(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _convert(item, leaf) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_convert(item, leaf) for item in value)
    if (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, _Packed)
    ):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(changed, field.name, _convert(getattr(value, field.name), leaf))
        return changed
    return leaf(value)
