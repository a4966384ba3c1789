"""Decompress a checkpoint with the real compressed-tensors, to compare with how we read it.

Run it where compressed-tensors, torch, transformers and safetensors are installed; nothing of this
repository is needed there::

    python scripts/decompress_with_compressed_tensors.py QUANTIZED DENSE
    phyai-quant compare QUANTIZED DENSE
"""

import argparse
import json
from pathlib import Path
from typing import Any

from compressed_tensors.compressors.base import (  # pyright: ignore[reportMissingImports]
    BaseCompressor,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationConfig,
)
from safetensors.torch import load_file, save_file

PARTS = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape")


def decompress(tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the dense tensors of a checkpoint.

    Args:
        tensors: Every tensor of the quantized checkpoint.
        config: Its config, as compressed-tensors read it.
    """
    dense = dict(tensors)
    for scheme in config.config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        for layer in scheme.targets:
            names = {part: f"{layer}.{part}" for part in PARTS if f"{layer}.{part}" in tensors}
            state = {part: dense.pop(name) for part, name in names.items()}
            dense[f"{layer}.weight"] = compressor.decompress(state, scheme)["weight"].contiguous()
    return dense


def main() -> None:
    """Read a quantized folder with one shard, write a dense one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("quantized", type=Path)
    parser.add_argument("dense", type=Path)
    arguments = parser.parse_args()
    config = json.loads((arguments.quantized / "config.json").read_text())
    section = QuantizationConfig.model_validate(config.pop("quantization_config"))
    tensors: dict[str, Any] = {}
    for shard in sorted(arguments.quantized.glob("*.safetensors")):
        tensors |= load_file(shard)
    arguments.dense.mkdir()
    save_file(decompress(tensors, section), arguments.dense / "model.safetensors")
    (arguments.dense / "config.json").write_text(json.dumps(config))
    print(f"{arguments.dense}: {len(section.config_groups)} groups decompressed")


if __name__ == "__main__":
    main()
