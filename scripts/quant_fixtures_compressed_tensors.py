# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "compressed-tensors==0.20.1",
#     "torch==2.11.0",
#     "transformers==5.5.4",
# ]
# ///
"""Write fixtures of the tiny π0.5: its linear layers, compressed by compressed-tensors itself.

Scales are min-max scales; codes, layouts and the expected weights are the library's. Embeddings,
norms and all but the first layer of each tower are left out.
"""
# pyright: reportMissingImports=false

import json
from pathlib import Path
from typing import Any

import torch
from quant_fixtures_common import FIXTURES, output_root, start_fixture, write_expected
from safetensors.torch import load_file, save_file

SOURCE = FIXTURES.parents[2] / "phyai-engine/tests/fixtures/pi05_tiny/model.safetensors"
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8 = {
    "format": "float-quantized",
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": FP8_TOKEN,
}
INT8 = {
    "format": "int-quantized",
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
}
INT4 = {
    "format": "pack-quantized",
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
}
NVFP4 = {
    "format": "nvfp4-pack-quantized",
    "weights": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
}
CASES = {
    "pi05_w8a8": {"group_0": INT8 | {"targets": ["Linear"]}},
    "pi05_nvfp4a16": {"group_0": NVFP4 | {"targets": ["Linear"]}},
    "pi05_mixed": {
        "vision": FP8 | {"targets": ["re:.*vision_tower.*"]},
        "language": INT4 | {"targets": ["re:.*language_model.*"]},
        "expert": NVFP4 | {"targets": ["re:.*gemma_expert.*"]},
    },
}
IGNORED = ("model.action_in_proj", "model.action_out_proj", "re:.*lm_head$")


def linear_weights() -> dict[str, torch.Tensor]:
    """Returns the weights ``[N, K]`` of the linear layers that a fixture holds, in bf16."""
    weights = {}
    for name, tensor in load_file(SOURCE).items():
        layer, _, part = name.rpartition(".")
        other_layer = ".layers." in name and ".layers.0." not in name
        linear = layer.endswith(("_proj", "fc1", "fc2", "time_mlp_in", "time_mlp_out"))
        if part == "weight" and linear and not other_layer:
            weights[layer] = tensor.to(torch.bfloat16)
    return weights


def minmax_scales(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Returns the scales that the library computes from the largest and smallest values."""
    from compressed_tensors.quantization import QuantizationStrategy
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    if args.strategy == QuantizationStrategy.CHANNEL:
        low, high = weight.aminmax(dim=1, keepdim=True)
        return {"weight_scale": calculate_qparams(low, high, args)[0]}
    low, high = weight.unflatten(1, (-1, args.group_size)).aminmax(dim=2)
    if args.strategy == QuantizationStrategy.GROUP:
        return {"weight_scale": calculate_qparams(low, high, args)[0]}
    total = generate_gparam(*(value.reshape(1) for value in weight.aminmax()))
    scale = calculate_qparams(low, high, args, global_scale=total)[0]
    return {"weight_scale": scale, "weight_global_scale": total}


def compress(layer: str, weight: torch.Tensor, schemes: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the stored tensors of a layer and the weight the library reads back."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.utils.match import match_name

    for scheme in schemes.values():
        if any(target == "Linear" or match_name(layer, target) for target in scheme.targets):
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            state = {"weight": weight, **minmax_scales(weight, scheme.weights)}
            stored = compressor.compress(state, scheme)
            return stored, compressor.decompress(dict(stored), scheme)["weight"]
    return {"weight": weight}, None


def write_case(folder: Path, groups: dict[str, Any]) -> None:
    """Writes one fixture."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
    from compressed_tensors.utils.match import match_name

    config = QuantizationConfig(
        config_groups=groups,
        ignore=list(IGNORED),
        quantization_status=QuantizationStatus.COMPRESSED,
        format="mixed-precision" if len(groups) > 1 else groups["group_0"]["format"],
    )
    start_fixture(folder)
    tensors, expected = {}, {}
    for layer, weight in linear_weights().items():
        stored, read = {"weight": weight}, None
        if not any(match_name(layer, entry) for entry in IGNORED):
            stored, read = compress(layer, weight, config.config_groups)
        tensors |= {f"{layer}.{name}": value.contiguous() for name, value in stored.items()}
        if read is not None:
            expected[layer] = read
    save_file(tensors, folder / "model.safetensors")
    inline = config.model_dump(mode="json")
    text = json.dumps({"type": "pi05", "quantization_config": inline}, indent=2)
    (folder / "config.json").write_text(text + "\n")
    write_expected(folder, expected)


def main() -> None:
    """Writes every case."""
    root = output_root(__doc__ or "", "compressed_tensors")
    for name, groups in CASES.items():
        write_case(root / name, groups)
        print(root / name)


if __name__ == "__main__":
    main()
