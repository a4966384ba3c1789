"""Read quantized weights with NumPy and nothing else; docs/formats.md says why it works."""

import json

import numpy as np

DTYPES = {"F8_E4M3": "u1", "BF16": "<u2", "BOOL": "?"}  # NumPy has no BF16 and no FP8: their bits
DTYPES |= {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IUF" for size in (1, 2, 4, 8)}
H4 = 0.5 - np.eye(4, dtype=np.float32)[::-1]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = [b / 512 if b < 8 else (8 + b % 8) * 2.0 ** (b // 8 - 10) for b in range(127)] + [np.nan]
E4M3 = np.array([*E4M3, *np.negative(E4M3)], np.float32)
ROWS = {"convrot_int8": np.float32, "int8_rowwise": np.float32, "float8_e4m3_rowwise": E4M3.take}


def read_tensors(path: str) -> tuple[dict, dict]:
    """Return the tensors of a file, memory-mapped, and the metadata of its header."""
    raw = np.memmap(path, mode="r")
    header, data = np.split(raw[8:], raw[:8].view("<i8"))
    tensors = json.loads(header.tobytes())
    metadata = tensors.pop("__metadata__", {})
    for key, val in tensors.items():
        tensors[key] = np.ndarray(val["shape"], DTYPES[val["dtype"]], data, val["data_offsets"][0])
    return tensors, metadata


def dequantize(config: dict, qdata: np.ndarray, scale: np.ndarray, level: float = 1) -> np.ndarray:
    """Return a weight in FP32; ``level`` is the per-tensor scale, one or one per expert."""
    if config["format"] in ("nvfp4", "convrot_nvfp4"):
        rows, blocks = qdata[..., 0].size, qdata.shape[-1] // 8
        if config["scale_layout"] == "swizzled":
            tiles = scale.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
            scale = tiles.transpose(0, 3, 2, 1, 4).reshape(len(tiles) * 128, -1)[:rows, :blocks]
        nibbles = (qdata >> 4, qdata & 15) if config["high_first"] else (qdata & 15, qdata >> 4)
        factors = np.repeat(level * E4M3[scale.reshape(*qdata.shape[:-1], blocks)], 16, axis=-1)
        weight = E2M1[np.stack(nibbles, axis=-1)].reshape(factors.shape) * factors
    else:
        weight = ROWS[config["format"]](qdata) * scale.reshape(-1, *[1] * (qdata.ndim - 1))
    for stride in [size for size in (1, 4, 16, 64) if size < config.get("group_size", 0)]:
        weight = (H4 @ weight.reshape(-1, 4, stride)).reshape(weight.shape)
    weight = np.moveaxis(weight, -1, 1) if weight.ndim == 5 else weight
    return weight.swapaxes(-2, -1) if config.get("transposed") else weight


def read_weights(path: str) -> dict[str, np.ndarray]:
    """Return the weights of a file as dense arrays, and its other tensors as stored."""
    tensors, metadata = read_tensors(path)
    layout = json.loads(metadata["piper_kernels.weights"])
    if layout["version"] != 1:
        raise ValueError(f"{path} has layout version {layout['version']}, this reads 1")
    for name, config in layout["weights"].items():
        fields = [f"{name}.{field}" for field in ("qdata", "scale", "per_tensor_scale")]
        tensors[name] = dequantize(config, *[tensors.pop(f) for f in fields if f in tensors])
    return tensors
