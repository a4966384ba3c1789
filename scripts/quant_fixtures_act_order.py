# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "compressed-tensors==0.12.2",
#     "frozendict>=2.4",
#     "torch==2.11.0",
#     "transformers==5.5.4",
# ]
# ///
"""Write the fixture of int4 weights whose groups follow a permutation of K (``weight_g_idx``).

compressed-tensors stopped writing them after version 0.12; this runs one that does. The weights are
those of one decoder layer of a tiny Llama.
"""
# pyright: reportMissingImports=false

import json
import tempfile
from pathlib import Path

import torch
from quant_fixtures_common import Sizes, build_llama, output_root, start_fixture, write_expected
from safetensors.torch import save_file

GROUP = 32
SIZES = Sizes(intermediate=96, layers=1)


def main() -> None:
    """Writes the case."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    folder = output_root(__doc__ or "", "compressed_tensors") / "w4a16_act_order"
    start_fixture(folder)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, actorder="group")
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=args)},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.COMPRESSED,
        format="pack-quantized",
    )
    compressor = PackedQuantizationCompressor(config=config)
    with tempfile.TemporaryDirectory() as scratch:
        model = build_llama(Path(scratch), SIZES)
    generator = torch.Generator().manual_seed(4)
    tensors, expected = {}, {}
    for name, weight in model.named_parameters():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            continue
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=generator)
        g_idx = torch.empty(columns, dtype=torch.int32)
        g_idx[order] = torch.arange(columns, dtype=torch.int32) // GROUP
        low, high = weight.detach()[:, order].unflatten(1, (-1, GROUP)).aminmax(dim=2)
        scale, zero = calculate_qparams(low, high, args)
        stored = compressor.compress_weight(weight.detach(), scale, args, zero, g_idx)
        stored |= {"weight_scale": scale, "weight_g_idx": g_idx}
        expected[layer] = compressor.decompress_weight(stored, args)
        tensors |= {f"{layer}.{part}": value.contiguous() for part, value in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    inline = config.model_dump(mode="json")
    text = json.dumps({"model_type": "llama", "quantization_config": inline}, indent=2)
    (folder / "config.json").write_text(text + "\n")
    write_expected(folder, expected)
    print(folder)


if __name__ == "__main__":
    main()
