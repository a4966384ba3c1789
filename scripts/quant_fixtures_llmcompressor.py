# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "compressed-tensors==0.19.0",
#     "llmcompressor==0.14.0.1",
#     "torch==2.11.0",
#     "torchvision==0.26.0",
#     "transformers==5.17.0",
# ]
# ///
"""Write the fixtures of LLM Compressor: a tiny Llama, quantized and exported in every format.

``expected.safetensors`` holds the weights as compressed-tensors decompresses them from the exported
files, and activations as its own fake quantization changes them.
"""
# pyright: reportMissingImports=false

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
    write_expected,
)

FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT8_CHANNEL = {"num_bits": 8, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4_SCALE = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}


def int_groups(group_size: int, **extra: Any) -> dict[str, Any]:
    """Returns the arguments of int4 weights, or of ``num_bits``, in groups along K."""
    return {"num_bits": 4, "strategy": "group", "group_size": group_size} | extra


def group(targets: list[str], weights: Any, activations: Any = None) -> dict[str, Any]:
    """Returns one config group."""
    return {"targets": targets, "weights": weights, "input_activations": activations}


@dataclass(frozen=True)
class Case:
    """One fixture: a preset's name or config groups, and the sizes of the model."""

    scheme: str | None = None
    groups: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    ignore: tuple[str, ...] = ("lm_head",)
    gptq: bool = False
    kv_cache: dict[str, Any] | None = None


# 47 columns and 48 rows divide by nothing that a preset without groups asks for
ODD = Sizes(intermediate=47)
# the last block of 128 is partial along N, along K and along both
BLOCKS = Sizes(hidden=128, intermediate=140, head_dim=20, layers=1)
GROUPS_OF_128 = Sizes(hidden=128, intermediate=128, head_dim=64, layers=1)
GROUPS_OF_32 = Sizes(intermediate=64)
STATIC_UINT8 = {"num_bits": 8, "strategy": "tensor", "symmetric": False, "dynamic": False}
STATIC_INT8 = {"num_bits": 8, "strategy": "tensor", "dynamic": False}

CASES = {
    "w8a8": Case("W8A8", sizes=ODD),
    "w8a8_static": Case(groups={"g": group(["Linear"], INT8_CHANNEL, STATIC_INT8)}),
    "w8a8_static_asymmetric": Case(groups={"g": group(["Linear"], INT8_CHANNEL, STATIC_UINT8)}),
    "w8a16_channel": Case(groups={"g": group(["Linear"], INT8_CHANNEL)}, sizes=ODD),
    "w8a16_g32_asymmetric": Case(
        groups={"g": group(["Linear"], int_groups(32, num_bits=8, symmetric=False))},
        sizes=GROUPS_OF_32,
    ),
    "fp8": Case("FP8", kv_cache={"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8_dynamic": Case("FP8_DYNAMIC", sizes=ODD),
    "fp8_block": Case("FP8_BLOCK", sizes=BLOCKS),
    "w4a16_g128": Case("W4A16", sizes=GROUPS_OF_128),
    "w4a16_g128_asymmetric": Case("W4A16_ASYM", sizes=GROUPS_OF_128),
    # 44 rows: the zero points of the last int32 are partly padding
    "w4a16_g32_asymmetric": Case(
        groups={"g": group(["Linear"], int_groups(32, symmetric=False))},
        sizes=Sizes(intermediate=44, head_dim=32),
        ignore=("lm_head", "re:.*down_proj"),
    ),
    "w4a16_actorder_static": Case(
        groups={"g": group(["Linear"], int_groups(32, actorder="static"))},
        sizes=GROUPS_OF_32,
        gptq=True,
    ),
    "w4afp8": Case(groups={"g": group(["Linear"], int_groups(32), FP8_TOKEN)}, sizes=GROUPS_OF_32),
    "nvfp4": Case("NVFP4"),
    "nvfp4a16": Case("NVFP4A16"),
    "mxfp4": Case("MXFP4", sizes=GROUPS_OF_32),
    "mxfp4a16": Case("MXFP4A16", sizes=GROUPS_OF_32),
    "mxfp8": Case("MXFP8", sizes=GROUPS_OF_32),
    "mixed_precision": Case(
        groups={
            "attention": group(["re:.*self_attn.*"], FP8_CHANNEL, FP8_TOKEN),
            "wide": group(["re:.*(gate|up)_proj$"], int_groups(32)),
            "down": group(
                ["re:.*down_proj$"],
                NVFP4 | NVFP4_SCALE,
                NVFP4 | NVFP4_SCALE | {"dynamic": "local", "observer": "static_minmax"},
            ),
        },
        ignore=("lm_head", "model.layers.1.self_attn.o_proj"),
    ),
}


def quantize(case: Case, base: Path, export: Path) -> Any:
    """Runs the tool on a fresh model, saves what it exports and returns the compressed model."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    model = build_llama(base, case.sizes)
    tokens = calibration_tokens()
    rows = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    modifier = GPTQModifier if case.gptq else QuantizationModifier
    recipe: dict[str, Any] = {"ignore": list(case.ignore)}
    if case.scheme:
        recipe |= {"targets": "Linear", "scheme": case.scheme}
    else:
        recipe["config_groups"] = case.groups
    if case.kv_cache:
        recipe["kv_cache_scheme"] = case.kv_cache
    oneshot(
        model=model,
        recipe=modifier(**recipe),
        processor=word_tokenizer(),
        dataset=Dataset.from_dict(rows),
        num_calibration_samples=len(tokens),
        max_seq_length=tokens.shape[1],
    )
    model.save_pretrained(export, save_compressed=True)
    return model


def word_tokenizer() -> Any:
    """Returns the smallest tokenizer there is; the data are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")  # noqa: S106


def decompress(model: Any, export: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the decompressed weight and the fake-quantized probe of every quantized layer."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    weights, activations = {}, {}
    for name, tensors in layers_of(read_tensors(export)).items():
        module = model.get_submodule(name)
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        weights[name] = compressor.decompress(dict(tensors), scheme)["weight"]
        columns, inputs = weights[name].shape[1], scheme.input_activations
        # the tool has no rule for an activation whose last group is partial
        whole = inputs is not None and columns % (inputs.group_size or 1) == 0
        if whole and is_probed(name):
            # "token" means a scale for each row of [B, T, K]
            x = probe(columns, grid=scheme.format.startswith("mxfp"))[None]
            activations[name] = forward_quantize(module, x, "input", inputs)[0]
    return weights, activations


def main() -> None:
    """Writes every case."""
    root = output_root(__doc__ or "", "llmcompressor")
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in CASES.items():
            export = Path(scratch) / name
            model = quantize(case, Path(scratch) / "base", export)
            keep_files(export, root / name, ("config.json", "model.safetensors"))
            write_expected(root / name, *decompress(model, export))
            print(root / name)


if __name__ == "__main__":
    main()
