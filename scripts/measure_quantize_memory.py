"""Measure the memory and time of ``phyai-quant quantize`` on a synthetic sharded checkpoint.

    python scripts/measure_quantize_memory.py --gigabytes 20 --folder /some/disk

The shards are sparse files of bf16 weights whose first rows hold random numbers; the rest reads as
zeros, which costs the same to quantize. Everything written is deleted at the end.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROWS, COLUMNS = 28672, 8192
RANDOM_ROWS = 256
LAYERS_PER_SHARD = 10
POLICIES = {
    "int8": "{dtype: int8}\n      input: {dtype: int8}",
    "fp8": "{dtype: fp8_e4m3}\n      input: {dtype: fp8_e4m3}",
    "int4": "{dtype: int4, block_shape: [1, 128]}",
    "nvfp4": "{dtype: nvfp4}",
    "convrot": "{dtype: int8, rotation_group: 64}\n      input: {dtype: int8}",
}


def write_shard(file: Path, names: list[str]) -> None:
    """Write a sparse shard of bf16 weights ``[ROWS, COLUMNS]``."""
    header, offset = {}, 0
    for name in names:
        end = offset + 2 * ROWS * COLUMNS
        header[name] = {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rows = torch.randn(RANDOM_ROWS, COLUMNS, dtype=torch.bfloat16).view(torch.uint8).numpy()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = stream.tell()
        for entry in header.values():
            stream.seek(start + entry["data_offsets"][0])
            stream.write(rows.data)
        stream.truncate(start + offset)


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write the checkpoint and return its bytes as readers see them."""
    folder.mkdir()
    weight_map = {}
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(layers)]
    for first in range(0, layers, LAYERS_PER_SHARD):
        part = names[first : first + LAYERS_PER_SHARD]
        file = folder / f"model-{first // LAYERS_PER_SHARD:05}.safetensors"
        write_shard(file, part)
        weight_map |= dict.fromkeys(part, file.name)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    """Write, quantize, measure, delete."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--policy", choices=POLICIES, default="int8")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="quantize-memory-", dir=arguments.folder))
    try:
        layers = max(1, round(arguments.gigabytes * 1e9 / (2 * ROWS * COLUMNS)))
        size = write_checkpoint(root / "source", layers)
        policy = root / "policy.yaml"
        policy.write_text(
            'quantization:\n  rules:\n    - match: {glob: "*"}\n'
            f"      weight: {POLICIES[arguments.policy]}\n"
        )
        code = "import sys; from phyai_quant.cli import main; sys.exit(main(sys.argv[1:]))"
        command = ["quantize", str(root / "source"), str(root / "target"), "--policy", str(policy)]
        began = time.monotonic()
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, *command], check=True)
        seconds = time.monotonic() - began
        # Linux counts KiB
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(
            f"{size / 1e9:.1f} GB in {layers} layers of {ROWS}x{COLUMNS} to {arguments.policy}: "
            f"peak {peak / 1e9:.2f} GB, {seconds:.0f} s, {size / 1e6 / seconds:.0f} MB/s"
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
