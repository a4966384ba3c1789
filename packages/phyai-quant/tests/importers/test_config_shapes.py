"""The table of config shapes: every entry is a test, and docs/quantization-configs.md shows it."""

import json
import os
import warnings
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from phyai_quant import QuantConfigError, load_quant_plan, materialize

SHAPES = YAML(typ="safe").load((Path(__file__).parent / "config_shapes.yaml").read_text("utf-8"))
CASES = [(section, case) for section, cases in SHAPES.items() for case in cases]
DOC = Path(__file__).parents[4] / "docs" / "quantization-configs.md"
UPDATE = "PHYAI_UPDATE_DOCS"
SIZES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F32": 4}


def files_of(case):
    if "config" in case:
        return {"config.json": {"quantization_config": case["config"]}}
    return case.get("files", {})


def write_markers(file, layers):
    header, data = {}, b""

    def add(name, dtype, shape, raw):
        nonlocal data
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw

    for layer, tensors in layers.items():
        for name, value in tensors.items():
            if name == "marker":
                raw = json.dumps(value).encode()
                add(f"{layer}.comfy_quant", "U8", [len(raw)], raw)
                continue
            dtype, *shape = value
            count = SIZES[dtype]
            for size in shape:
                count *= size
            add(f"{layer}.{name}", dtype, shape, bytes(count))
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write(case, directory):
    for name, content in files_of(case).items():
        (directory / name).write_text(json.dumps(content))
    if "markers" in case:
        write_markers(directory / "model.safetensors", case["markers"])


def describe(plan, layer):
    resolution = plan.explain(layer, "Linear")
    if not resolution.agrees:
        return "error, the legs disagree"
    if resolution.scheme is None:
        return "unquantized"
    return resolution.scheme.describe().removesuffix(", quantized on disk")


@pytest.mark.parametrize(("section", "case"), CASES, ids=[f"{s}: {c['name']}" for s, c in CASES])
def test_shape(section, case, tmp_path):
    write(case, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "error" in case:
            with pytest.raises(QuantConfigError) as error:
                load_quant_plan(tmp_path)
            assert case["error"] in str(error.value)
            assert str(tmp_path) in str(error.value)
            return
        plan = load_quant_plan(tmp_path)
    if case["plan"] == "none":
        assert plan is None
        return
    assert {layer: describe(plan, layer) for layer in case["plan"]} == case["plan"]
    cache = None if plan.kv_cache is None else plan.kv_cache.describe()
    assert cache == case.get("cache")
    for scheme in {plan.default, *(rule.scheme for rule in plan.rules)}:
        materialize(scheme)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == ("warning" in case), texts
    assert case.get("warning", "") in "".join(texts)


def test_there_are_shapes_of_every_format():
    assert len(CASES) >= 60
    assert len({(section, case["name"]) for section, case in CASES}) == len(CASES)
    assert all(("error" in case) is not ("plan" in case) for _, case in CASES)


INTRO = """\
# Quantization configs

What `phyai_quant.load_quant_plan` makes of the quantization configs that tools write. Every row is
a test, and this page is written from the same data:
`packages/phyai-quant/tests/importers/config_shapes.yaml`.

A layer is matched by its checkpoint name. Fused layers (`qkv_proj`, `gate_up_proj`) are the layers
they were fused from: a rule may name either, and all legs must agree. A leading `model.` or
`language_model.` and wrapper suffixes (`.linear`, `.base_layer`) make no difference. The first
matching rule decides. A null key is an absent one. What contradicts itself, and what this package
cannot compute, is an error that names file, key, value and what is allowed. An ignore entry or a
target that matches no layer of the model is warned of with file, key and entry, and a quantized
tensor without a rule is an error: nothing is loaded unquantized by accident.

A policy's `quantization` section makes the same kind of plan.
`policy_plan.merged_with(checkpoint_plan)` tests the policy's rules first, then the checkpoint's,
then the default that one of them has, so a rule for one layer leaves the others as the checkpoint
declares them. `phyai_quant.plan_io` writes plans to JSON or YAML files and reads them back.
"""


def render():
    parts = [INTRO]
    for section, cases in SHAPES.items():
        parts += [f"## {section}\n", "| config | result |\n| --- | --- |"]
        parts += [f"| {case['name']} | {'<br>'.join(result(case))} |" for case in cases]
        parts.append("\n<details><summary>These configs</summary>\n")
        for case in cases:
            parts.append(f"{case['name'][0].upper()}{case['name'][1:]}:\n")
            parts += [f"```json\n{compact(name, content)}\n```\n" for name, content in shown(case)]
        parts.append("</details>\n")
    return "\n".join(parts)


def shown(case):
    if "config" in case:
        return [("", case["config"])]
    if "markers" in case:
        return [("", {f"{k}.comfy_quant": v["marker"] for k, v in case["markers"].items()})]
    return list(case["files"].items())


def compact(name, content):
    """JSON with one line per key, deeper levels on that line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    body = "{\n" + ",\n".join(lines) + "\n}"
    return f"// {name}\n{body}" if name else body


def result(case):
    if "error" in case:
        return [f"error: `{case['error']}`"]
    if case["plan"] == "none":
        return [
            "No plan. Tensors that are quantized nevertheless are refused when they are loaded."
        ]
    lines = [f"`{layer}`: {text}" for layer, text in case["plan"].items()]
    if "cache" in case:
        lines.append(f"KV cache, kept as data: {case['cache']}")
    if "warning" in case:
        lines.append(f"warning: `{case['warning']}`")
    return lines


def test_the_documentation_shows_the_table():
    text = render()
    if os.environ.get(UPDATE):
        DOC.write_text(text, encoding="utf-8")
    written = DOC.read_text(encoding="utf-8") if DOC.exists() else ""
    assert written == text, f"{DOC} is out of date; write it with {UPDATE}=1 and this test"
