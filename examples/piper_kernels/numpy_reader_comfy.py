"""Read quantized weights of ComfyUI's layout, or of ours, with NumPy; see docs/formats.md.

python examples/piper_kernels/numpy_reader_comfy.py weights.safetensors
"""

import json
import sys

import numpy as np
import numpy_reader

FORMATS = {
    ("int8_tensorwise", False): "int8_rowwise",
    ("int8_tensorwise", True): "convrot_int8",
    ("float8_e4m3fn", False): "float8_e4m3_rowwise",
    ("nvfp4", False): "nvfp4",
    ("convrot_nvfp4", True): "convrot_nvfp4",
}


def describe(marker: dict) -> dict:
    """Return what a marker says in the terms of layout piper."""
    config = {"format": FORMATS[marker["format"], marker.get("convrot", False)]}
    if marker.get("convrot"):
        config["group_size"] = marker["convrot_groupsize"]
    return config | {"scale_layout": "swizzled", "high_first": marker.get("high_first", False)}


def read_weights(path: str) -> dict[str, np.ndarray]:
    """Return the weights of a file as dense arrays, and its other tensors as stored."""
    tensors, metadata = numpy_reader.read_tensors(path)
    if "piper_kernels.weights" in metadata:
        return numpy_reader.read_weights(path)
    for name in [name for name in tensors if name.split(".")[-1] == "comfy_quant"]:
        marker = json.loads(tensors.pop(name).tobytes())
        weight = name.removesuffix("comfy_quant") + "weight"
        fields = [weight, f"{weight}_scale", f"{weight}_scale_2"]
        parts = [tensors.pop(field) for field in fields if field in tensors]
        tensors[weight] = numpy_reader.dequantize(describe(marker), *parts)
    return tensors


if __name__ == "__main__":
    for tensor_name, array in read_weights(sys.argv[1]).items():
        print(f"{tensor_name}: {array.dtype} {list(array.shape)}, largest {np.abs(array).max():g}")
