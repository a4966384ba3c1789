"""From openpi's JAX checkpoints to its PyTorch layout, which the engine loads."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from phyai.checkpoints import CheckpointError
from phyai.checkpoints.orbax import OrbaxReader
from phyai.models.pi05.openpi_params import (
    action_width,
    converted,
    parameter_name,
    vision_heads,
)
from phyai.models.pi05.sizes import SIDECAR
from phyai.processing.openpi import NORM_STATS

SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote.

    Attributes:
        tensors: number of tensors.
        parameters: number of their elements.
        files: weight files, in order.
        assets: ids of the robots whose statistics were copied.
    """

    tensors: int
    parameters: int
    files: tuple[Path, ...]
    assets: tuple[str, ...]


def convert_openpi(
    source: Path,
    target: Path,
    *,
    action_horizon: int = 50,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Converts an openpi checkpoint, one array at a time, and copies its statistics.

    Args:
        source: folder with ``params`` (an Orbax item) and, usually, ``assets``.
        target: folder to write; it must not exist yet.
        action_horizon: actions in a chunk; the arrays do not tell it.
        dtype: of the written tensors; None keeps that of the arrays.
        shard_bytes: size from which on a weight file is closed.

    Raises:
        CheckpointError: if the source is no such checkpoint or the target exists.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise CheckpointError(f"{target} exists already; name a folder that does not")
    reader = OrbaxReader(source / "params")
    shapes = {parameter_name(name): reader.shape(name) for name in reader.names}
    config = {"action_dim": action_width(shapes), "action_horizon": action_horizon}
    sidecar = {"vision_num_heads": vision_heads(shapes)}
    unfinished = target.with_name(f"{target.name}.unfinished")
    if unfinished.exists():
        raise CheckpointError(f"{unfinished} is left from a conversion that failed; remove it")
    unfinished.mkdir(parents=True)
    try:
        tensors, parameters, names = _write_weights(reader, unfinished, dtype, shard_bytes)
        for name, value in (("config.json", config), (SIDECAR, sidecar)):
            (unfinished / name).write_text(json.dumps(value, indent=2) + "\n")
        assets = _copy_assets(source, unfinished)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return Converted(tensors, parameters, tuple(target / name for name in names), assets)


def _tensors(reader: OrbaxReader, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for stored in reader.names:
        for name, tensor in converted(parameter_name(stored), reader.get(stored)):
            yield name, tensor.to(dtype or tensor.dtype).contiguous()


def _write_weights(
    reader: OrbaxReader, folder: Path, dtype: torch.dtype | None, shard_bytes: int
) -> tuple[int, int, list[str]]:
    shards: list[list[str]] = []
    total = parameters = held = 0
    batch: dict[str, Tensor] = {}

    def close() -> None:
        save_file(batch, folder / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(batch))
        batch.clear()

    for name, tensor in _tensors(reader, dtype):
        # A view of all layers would keep them in memory until its shard is written.
        batch[name] = (
            tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        )
        total += tensor.nbytes
        held += tensor.nbytes
        parameters += tensor.numel()
        if held >= shard_bytes:
            close()
            held = 0
    if batch:
        close()
    names = _name_shards(folder, shards, total)
    return sum(len(shard) for shard in shards), parameters, names


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> list[str]:
    """Gives the files their final names, and writes the index where there are several."""
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        weight_map = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)
    for number, name in enumerate(names):
        (folder / f"part-{number}.safetensors").rename(folder / name)
    return names


def _copy_assets(source: Path, folder: Path) -> tuple[str, ...]:
    assets = source / "assets"
    found = sorted(assets.rglob(NORM_STATS))
    for file in found:
        copy = folder / "assets" / file.relative_to(assets)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return tuple(file.parent.relative_to(assets).as_posix() for file in found)
