# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "nvidia-modelopt==0.47.0",
#     "torch==2.11.0",
#     "torchvision==0.26.0",
#     "transformers==5.5.4",
# ]
# ///
"""Write the fixtures of ModelOpt: a tiny Llama, quantized and exported in every format.

``expected.safetensors`` holds the exported weights as ModelOpt's own quantized tensors dequantize
them in fp32, and activations as its input quantizers change them. Formats that scale their inputs
keep the configs alone: they are to be refused.
"""
# pyright: reportMissingImports=false

import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from quant_fixtures_common import (
    Sizes,
    build_llama,
    calibration_tokens,
    is_probed,
    keep_files,
    layers_of,
    output_root,
    probe,
    read_tensors,
    start_fixture,
    write_expected,
)

CONFIGS = ("config.json", "hf_quant_config.json")
GROUPS_OF_32 = Sizes(intermediate=64)
GROUPS_OF_128 = Sizes(hidden=128, intermediate=128, head_dim=64, layers=1)
# the last block of 128 is partial along N, along K and along both
BLOCKS = Sizes(hidden=128, intermediate=132, layers=1)
ODD = Sizes(intermediate=47)


@dataclass(frozen=True)
class Case:
    """One fixture: the name of the tool's config, the dequantizer, the sizes of the model."""

    config: str
    read: str | None
    sizes: Sizes = field(default_factory=Sizes)


CASES = {
    "fp8": Case("FP8_DEFAULT_CFG", "fp8", ODD),
    "fp8_kv_cache": Case("kv_cache", "fp8"),
    "fp8_per_channel_per_token": Case("FP8_PER_CHANNEL_PER_TOKEN_CFG", "fp8_channel", ODD),
    "fp8_pb_wo": Case("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "fp8_block", BLOCKS),
    "int8_weight_only": Case("INT8_WEIGHT_ONLY_CFG", "int8", ODD),
    "mixed_precision": Case("mixed", "mixed"),
    "mxfp4": Case("MXFP4_DEFAULT_CFG", "mxfp4", GROUPS_OF_32),
    "mxfp8": Case("MXFP8_DEFAULT_CFG", "mxfp8", GROUPS_OF_32),
    "nvfp4": Case("NVFP4_DEFAULT_CFG", "nvfp4"),
    "w4a16_nvfp4": Case("W4A16_NVFP4_CFG", "nvfp4"),
    "w4a8_mxfp4_fp8": Case("W4A8_MXFP4_FP8_CFG", "mxfp4", GROUPS_OF_32),
    "w4a8_nvfp4_fp8": Case("W4A8_NVFP4_FP8_CFG", "nvfp4", GROUPS_OF_32),
    "int8_smoothquant": Case("INT8_SMOOTHQUANT_CFG", None),
    "w4a8_awq": Case("W4A8_AWQ_BETA_CFG", None, GROUPS_OF_128),
    "w4a16_awq": Case("INT4_AWQ_CFG", None, GROUPS_OF_128),
}


def tool_config(name: str) -> dict[str, Any]:
    """Returns the tool's config.

    ``kv_cache`` is FP8 with FP8 keys and values; ``mixed`` is FP8 attention, NVFP4 MLPs and one
    bf16 layer.
    """
    import modelopt.torch.quantization as mtq

    if name not in ("kv_cache", "mixed"):
        return copy.deepcopy(getattr(mtq, name))
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    if name == "kv_cache":
        config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
        return config
    fp4 = [entry["cfg"] for entry in mtq.NVFP4_DEFAULT_CFG["quant_cfg"] if "cfg" in entry]
    config["quant_cfg"] += [
        {"quantizer_name": "*mlp*weight_quantizer", "cfg": fp4[0]},
        {"quantizer_name": "*mlp*input_quantizer", "cfg": fp4[1]},
        {"quantizer_name": "*layers.1.self_attn.o_proj*", "enable": False},
    ]
    return config


def quantize(case: Case, base: Path, export: Path) -> dict[str, torch.Tensor]:
    """Runs the tool on a fresh model and exports it.

    Returns:
        The fake-quantized probe of every probed layer whose input is quantized.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = build_llama(base, case.sizes)
    tokens = calibration_tokens()
    model = mtq.quantize(model, tool_config(case.config), lambda module: module(tokens))
    activations = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "input_quantizer", None)
        if quantizer is None or not quantizer.is_enabled or not is_probed(name):
            continue
        # quantizers with blocks run on CUDA alone
        if quantizer.block_sizes is None:
            activations[name] = quantizer(probe(module.in_features)[None])[0]
    export_hf_checkpoint(model, export_dir=export)
    return activations


def dequantize(kind: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the fp32 weight that the tool reads from one layer's exported tensors."""
    from modelopt.torch.quantization import qtensor

    codes, scale = tensors["weight"], tensors["weight_scale"]
    packed = kind in ("nvfp4", "mxfp4")
    shape = torch.Size((codes.shape[0], codes.shape[1] * (2 if packed else 1)))
    arguments: dict[str, Any] = {"scale": scale}
    if kind in ("fp8_channel", "int8"):
        arguments["scale"] = scale[:, None]
    elif kind == "fp8_block":
        # exported as [N/128, 1, K/128, 1], a single block as a scalar
        arguments["scale"] = scale.reshape(-(-shape[0] // 128), -1)
        arguments["block_sizes"] = {-1: 128, -2: 128}
    elif packed:
        arguments["block_sizes"] = {-1: shape[1] // scale.shape[1]}
        arguments["double_scale"] = tensors.get("weight_scale_2")
    wrappers = {
        "fp8": qtensor.FP8QTensor,
        "fp8_channel": qtensor.FP8QTensor,
        "fp8_block": qtensor.FP8QTensor,
        "int8": qtensor.INT8QTensor,
        "mxfp4": qtensor.MXFP4QTensor,
        "mxfp8": qtensor.MXFP8QTensor,
        "nvfp4": qtensor.NVFP4QTensor,
    }
    wrapper = wrappers[kind](shape, torch.float32, codes)
    return wrapper.dequantize(dtype=torch.float32, **arguments).reshape(shape)


def read_export(kind: str, export: Path) -> dict[str, torch.Tensor]:
    """Returns the dequantized weight of every quantized layer."""
    weights = {}
    for name, tensors in layers_of(read_tensors(export)).items():
        if "weight_scale" in tensors:
            nvfp4 = "weight_scale_2" in tensors
            own = ("nvfp4" if nvfp4 else "fp8") if kind == "mixed" else kind
            weights[name] = dequantize(own, tensors)
    return weights


def main() -> None:
    """Writes every case."""
    root = output_root(__doc__ or "", "modelopt")
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in CASES.items():
            export = Path(scratch) / name
            activations = quantize(case, Path(scratch) / "base", export)
            if case.read is None:
                start_fixture(root / name)
                for config in CONFIGS:
                    shutil.copyfile(export / config, root / name / config)
            else:
                keep_files(export, root / name, (*CONFIGS, "model.safetensors"))
                # the scales that calibration gives FP8 inputs of MXFP4 weights are not exported
                probed = {} if case.read == "mxfp4" else activations
                write_expected(root / name, read_export(case.read, export), probed)
            print(root / name)


if __name__ == "__main__":
    main()
