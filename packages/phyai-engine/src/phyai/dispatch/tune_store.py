"""The file of measured times, shared by processes."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phyai.dispatch.tune_workload import Workload

SCHEMA = "phyai.autotune/v1"
LOCK_SECONDS = 10.0

Times = dict[str, float | None]
"""Row label to milliseconds; None for a row that could not be measured."""

_log = logging.getLogger(__name__)


class TuneStore:
    """Times by workload, in memory and, with a path, in a JSON file.

    Several processes may use one file: each write takes a lock next to it, adds to what is there
    and replaces the file in one step. A file that cannot be read counts as empty; one that cannot
    be written is reported as a warning and changes nothing else.

    Args:
        path: file of the times; None keeps them in memory.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path: Path | None = Path(path).expanduser() if path is not None else None
        self._seen: tuple[int, int, int] | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._refresh()

    def times(self, workload: Workload) -> Times:
        """Returns the times known of a workload, empty if there are none."""
        entry = self._entries.get(workload.digest)
        if entry is None:
            self._refresh()
            entry = self._entries.get(workload.digest)
        return {} if entry is None else dict(entry["milliseconds"])

    def add(self, workload: Workload, times: Mapping[str, float | None]) -> None:
        """Adds times; they replace older ones of the same rows."""
        self._merge({workload.digest: {"workload": workload.content, "milliseconds": times}})
        if self.path is None:
            return
        try:
            self._write(self.path, workload.digest)
        except (OSError, TimeoutError) as error:
            _log.warning("the autotune cache %s was not written: %s", self.path, error)

    def _merge(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        for digest, entry in entries.items():
            known = self._entries.get(digest, {}).get("milliseconds", {})
            times = {**known, **entry["milliseconds"]}
            self._entries[digest] = {"workload": entry["workload"], "milliseconds": times}

    def _refresh(self) -> None:
        """Reads the file if it changed since it was last read."""
        if self.path is None:
            return
        try:
            status = self.path.stat()
        except OSError:
            return
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp != self._seen:
            self._seen = stamp
            self._merge(read_entries(self.path))

    def _write(self, path: Path, digest: str) -> None:
        from filelock import FileLock

        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            mine = self._entries[digest]
            self._seen = None
            self._refresh()
            self._merge({digest: mine})
            replace_file(path, {"schema": SCHEMA, "workloads": self._entries})


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the sound entries of a file by digest; nothing from a file of another schema."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("the autotune cache %s is ignored: %s", path, error)
        return {}
    workloads = document.get("workloads") if isinstance(document, dict) else None
    if not isinstance(workloads, dict) or document.get("schema") != SCHEMA:
        _log.warning("the autotune cache %s is ignored: its schema is not %s", path, SCHEMA)
        return {}
    return {digest: entry for digest, entry in workloads.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("workload"), dict):
        return False
    times = entry.get("milliseconds")
    return isinstance(times, dict) and all(
        value is None or (type(value) in (int, float) and value >= 0) for value in times.values()
    )


def replace_file(path: Path, document: Any) -> None:
    """Writes JSON beside the file and renames it, so that no reader sees half of it.

    The caller holds the lock: two writers of one process would use one temporary name.

    Raises:
        OSError: if the folder cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("w", encoding="utf-8") as stream:
            json.dump(document, stream, sort_keys=True, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
