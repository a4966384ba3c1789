"""Read files of quantized weights with NumPy and nothing else; docs/formats.md says why it works.

python examples/piper_kernels/numpy_reader.py weights.safetensors
"""

import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "BOOL": "?"}
DTYPES |= {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)}
H4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = np.array([(8 + b % 8) * 2.0 ** (b // 8 - 10) for b in range(128)], np.float32)
E4M3[:8], E4M3[127] = np.arange(8) * 2.0**-9, np.nan  # subnormals, NaN
E4M3 = np.concatenate([E4M3, -E4M3])
ONE = np.ones((), np.float32)
COMFY = {"scale": "weight_scale", "per_tensor_scale": "weight_scale_2"}


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the stored tensors (memory-mapped, FP8 as bytes) and the header's metadata."""
    raw = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:start].tobytes())
    metadata, tensors = header.pop("__metadata__", {}), {}
    if raw.size != start + max((e["data_offsets"][1] for e in header.values()), default=0):
        raise ValueError(f"{path} is truncated or has trailing bytes")
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = raw[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            tensors[name] = (tensors[name].astype(np.uint32) << 16).view(np.float32)
    return tensors, metadata


def dequantize(config: dict, qdata: np.ndarray, scale: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Return a weight in FP32 from its description and its stored tensors."""
    if "nvfp4" in config["format"]:
        rows, columns = qdata.shape[0], 2 * qdata.shape[1]
        if config["scale_layout"] == "swizzled":
            tiles = scale.reshape(-(-rows // 128), -(-columns // 64), 32, 4, 4)
            scale = tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0] * 128, -1)
            scale = scale[:rows, : columns // 16]
        nibbles = (qdata >> 4, qdata & 15) if config["high_first"] else (qdata & 15, qdata >> 4)
        factors = np.repeat(level * E4M3[scale.reshape(rows, -1)], 16, axis=1)
        weight = E2M1[np.stack(nibbles, axis=-1).reshape(rows, columns)] * factors
    else:
        values = E4M3[qdata] if "float8" in config["format"] else qdata.astype(np.float32)
        weight = values * scale.reshape(-1, *[1] * (qdata.ndim - 1))
    group, matrix = config.get("group_size"), H4
    while group and len(matrix) < group:
        matrix = np.kron(matrix, H4)
    if group:
        weight = (weight.reshape(-1, group) @ matrix / group**0.5).reshape(weight.shape)
    weight = np.moveaxis(weight, -1, 1) if weight.ndim == 5 else weight
    return weight.T if config.get("transposed") else weight


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Return the weights of a file, in either layout, as dense arrays; other tensors as stored."""
    tensors, metadata = read_tensors(path)
    weights = {}
    described = json.loads(metadata.get("piper_kernels.weights", '{"weights": {}}'))["weights"]
    for name, config in described.items():
        parts = {field: tensors.pop(f"{name}.{field}", ONE) for field in ("qdata", *COMFY)}
        weights[name] = dequantize(config, *parts.values())
    for name in [name for name in tensors if name.split(".")[-1] == "comfy_quant"]:
        marker, prefix = json.loads(tensors.pop(name).tobytes()), name.removesuffix("comfy_quant")
        config = {"scale_layout": "swizzled", "high_first": False, **marker}
        config["group_size"] = marker["convrot_groupsize"] if marker.get("convrot") else None
        parts = [tensors.pop(prefix + part, ONE) for part in ("weight", *COMFY.values())]
        weights[prefix + "weight"] = dequantize(config, *parts)
    return weights | tensors


if __name__ == "__main__":
    for tensor_name, array in read_weights(Path(sys.argv[1])).items():
        print(f"{tensor_name}: {array.dtype} {list(array.shape)}, largest {np.abs(array).max():g}")
