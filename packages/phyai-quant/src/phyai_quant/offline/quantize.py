"""Quantizes a checkpoint folder shard by shard into another folder."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phyai_quant.checkpoint import load_quant_plan
from phyai_quant.offline.files import INDEX_FILE, TensorEntry, read_checkpoint
from phyai_quant.offline.layers import find_layers
from phyai_quant.offline.shard_writer import ShardWriter
from phyai_quant.offline.work import LayerWork, Work, plan_work
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QuantConfigError
from piper_kernels.weights.io import read_header

RECORD_FILE = ".phyai-quantize.json"
"""Names the shards that are finished; it disappears when the whole checkpoint is."""

CHUNK_BYTES = 32 * 2**20
"""fp32 bytes of the rows that are quantized at once; temporaries are a few times as large."""

Progress = Callable[[str, int], None]

_CONFIG_FILE = "config.json"
_LEFT_OUT = (
    "*.safetensors",
    "*.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.partial",
    ".git",
    ".cache",
    RECORD_FILE,
)


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What was written.

    Attributes:
        work: The decisions, layer by layer.
        shards: Names of the written files.
        resumed: Those of them that an earlier, interrupted run had finished.
    """

    work: Work
    shards: tuple[str, ...]
    resumed: tuple[str, ...]


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    plan: QuantPlan,
    *,
    device: torch.device | str = "cpu",
    on_progress: Progress | None = None,
) -> QuantizeReport:
    """Writes a quantized copy of a dense checkpoint.

    Weights are read, quantized and written in pieces of whole rows, so the memory needed depends
    neither on the size of a shard nor on that of a layer. Every shard is written beside its final
    name and renamed; a run that was interrupted continues with the first shard that is not
    finished. The config is written last. Other files of the folder are copied, but for weights in
    other formats.

    Args:
        source: Folder with safetensors files in fp32, fp16 or bf16.
        target: Folder to write: absent, empty, or left by an interrupted run of the same work.
        plan: What to quantize to. Embeddings are left alone.
        device: Where the arithmetic runs.
        on_progress: Called with the name of a tensor and the bytes of it that were read.

    Raises:
        QuantConfigError: The plan or the source cannot be honoured, the target holds something
            else, the disk is too small, or a weight holds values that are not finite.
        OSError: A file cannot be read or written.
    """
    work = plan_work(read_checkpoint(source), plan)
    root = Path(target)
    done = _open_target(work, root)
    resumed = tuple(done)
    for shard in work.checkpoint.shards:
        names = work.checkpoint.names_of(shard)
        if shard.name in done:
            _report_skipped(work, names, on_progress)
            continue
        _write_shard(work, shard, root, torch.device(device), on_progress)
        done[shard.name] = (root / shard.name).stat().st_size
        _write_json(root / RECORD_FILE, {"fingerprint": work.fingerprint, "finished": done})
    _finish(work, root)
    return QuantizeReport(work, tuple(shard.name for shard in work.checkpoint.shards), resumed)


def _open_target(work: Work, root: Path) -> dict[str, int]:
    """Returns name and size of the shards that are finished already."""
    source = work.checkpoint.directory.resolve()
    if root.resolve() == source or source in root.resolve().parents:
        raise QuantConfigError(f"{root}: lies inside the source; give a folder elsewhere")
    record = root / RECORD_FILE
    done: dict[str, int] = {}
    if record.is_file():
        done = _finished(record, work, root)
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise QuantConfigError(
            f"{root}: exists and holds no interrupted run; give a folder that is empty or absent"
        )
    root.mkdir(parents=True, exist_ok=True)
    needed = work.nbytes - sum(done.values())
    free = shutil.disk_usage(root).free
    if needed > free:
        raise QuantConfigError(
            f"{root}: {needed:,} bytes will be written but {free:,} are free; make room or give "
            "a folder on another disk"
        )
    if not record.is_file():
        _write_json(record, {"fingerprint": work.fingerprint, "finished": {}})
    return done


def _finished(record: Path, work: Work, root: Path) -> dict[str, int]:
    try:
        data = json.loads(record.read_text(encoding="utf-8"))
        fingerprint, finished = data["fingerprint"], dict(data["finished"])
    except (ValueError, KeyError, TypeError) as error:
        raise QuantConfigError(
            f"{record}: is no record of a run ({error!r}); delete {root} and start again"
        ) from error
    if fingerprint != work.fingerprint:
        raise QuantConfigError(
            f"{root}: holds an interrupted run with another policy or another source; give "
            "another folder, or delete this one to start again"
        )
    return {
        name: size
        for name, size in finished.items()
        if (root / name).is_file() and (root / name).stat().st_size == size
    }


def _write_shard(
    work: Work, shard: Path, root: Path, device: torch.device, on_progress: Progress | None
) -> None:
    names = work.checkpoint.names_of(shard)
    tensors = work.tensors_of(names)
    with ShardWriter(root / shard.name, tensors, work.metadata_of(shard.name, names)) as writer:
        for name in names:
            layer_work = work.layers.get(name)
            if layer_work is not None:
                _quantize_layer(layer_work, name, writer, device, on_progress)
                continue
            for piece in _pieces(work.checkpoint.tensors[name]):
                writer.append(name, piece)
                if on_progress is not None:
                    on_progress(name, piece.nbytes)


def _quantize_layer(
    work: LayerWork,
    name: str,
    writer: ShardWriter,
    device: torch.device,
    on_progress: Progress | None,
) -> None:
    layer, encoder = work.layer, work.encoder
    rows, columns = layer.weight.shape
    largest = torch.zeros((), device=device)
    try:
        if encoder.two_passes:
            for _, dense in _dense_rows(work, device):
                largest = torch.maximum(largest, encoder.measure(dense))
        for nbytes, dense in _dense_rows(work, device):
            for tensor, piece in encoder.encode(dense, largest).items():
                writer.append(layer.full_name(tensor), piece)
            if on_progress is not None:
                on_progress(name, nbytes)
        for tensor, value in encoder.constants(rows, columns, largest).items():
            writer.append(layer.full_name(tensor), value)
    except QuantConfigError as error:
        raise QuantConfigError(f"{name}: {error}") from error


def _dense_rows(work: LayerWork, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    entry = work.layer.weight
    rows, columns = entry.shape
    step = max(1, CHUNK_BYTES // (4 * columns) // work.encoder.row_multiple)
    step *= work.encoder.row_multiple
    for start in range(0, rows, step):
        stored = entry.read_rows(start, min(start + step, rows))
        dense = stored.to(device).float()
        if not bool(torch.isfinite(dense).all()):
            raise QuantConfigError(
                f"rows {start} to {start + len(dense)} hold NaN or infinite values; repair the "
                "checkpoint or keep the layer unquantized"
            )
        yield stored.nbytes, dense


def _pieces(entry: TensorEntry) -> Iterator[torch.Tensor]:
    if not entry.shape:
        yield entry.read()
        return
    row_bytes = max(1, entry.nbytes // max(1, entry.shape[0]))
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, entry.shape[0], step):
        yield entry.read_rows(start, min(start + step, entry.shape[0]))


def _report_skipped(work: Work, names: list[str], on_progress: Progress | None) -> None:
    if on_progress is not None:
        for name in names:
            on_progress(name, work.checkpoint.tensors[name].nbytes)


def _finish(work: Work, root: Path) -> None:
    shutil.copytree(
        work.checkpoint.directory,
        root,
        ignore=shutil.ignore_patterns(*_LEFT_OUT),
        dirs_exist_ok=True,
    )
    _copy_statistics(work, root)
    if (work.checkpoint.directory / INDEX_FILE).is_file() or len(work.checkpoint.shards) > 1:
        _write_index(work, root)
    config_file = root / _CONFIG_FILE
    section = work.quantization_config()
    if section is not None:
        config = {}
        if config_file.is_file():
            config = json.loads(config_file.read_text(encoding="utf-8"))
        _write_json(config_file, {**config, "quantization_config": section})
    _check_readable(work, root)
    (root / RECORD_FILE).unlink()


def _copy_statistics(work: Work, root: Path) -> None:
    """Copies safetensors files that are no shards and hold no layer with a weight matrix."""
    for file in sorted(work.checkpoint.directory.glob("*.safetensors")):
        if file in work.checkpoint.shards:
            continue
        stored = read_header(file).tensors
        if not find_layers({name: TensorEntry(file, entry) for name, entry in stored.items()}):
            shutil.copy2(file, root / file.name)


def _write_index(work: Work, root: Path) -> None:
    weight_map = {}
    for shard in work.checkpoint.shards:
        tensors = work.tensors_of(work.checkpoint.names_of(shard))
        weight_map |= dict.fromkeys(tensors, shard.name)
    index = {
        "metadata": {"total_size": work.nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(root / INDEX_FILE, index)


def _check_readable(work: Work, root: Path) -> None:
    """Reads the config back: each layer must get the number format that was written."""
    plan = load_quant_plan(root)
    for name, scheme in work.schemes.items():
        read = None if plan is None else plan.resolve(name, "Linear")
        seen = None if read is None else (read.weight.dtype, read.weight.block_shape)
        if seen != (scheme.weight.dtype, scheme.weight.block_shape):
            got = "unquantized" if read is None else read.describe()
            raise QuantConfigError(
                f"{root}: the written config reads back {name} as {got}, not as "
                f"{scheme.describe()}; rename the layer in the checkpoint or quantize it alone"
            )


def _write_json(file: Path, data: Any) -> None:
    partial = file.with_name(file.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(data, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
