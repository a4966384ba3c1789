import math
import sys

import pytest
import torch

from phyai_quant import QuantConfigError
from phyai_quant.offline.comparison import compare_checkpoints
from phyai_quant.offline.heatmap import cells_of, draw_heatmap
from phyai_quant.offline.quantize import quantize_checkpoint
from phyai_quant.offline.spec_loading import dequantize_layer

LAYER = "model.layers.1.down_proj"


def test_sqnr_of_every_layer(weights, dense, tmp_path, make_policy):
    quantize_checkpoint(dense, tmp_path / "out", make_policy({"dtype": "mxfp4"}, None, "*layers*"))
    seen: list[str] = []
    found = compare_checkpoints(dense, tmp_path / "out", on_progress=seen.append)
    assert len(found.layers) == len(seen) == 7
    assert len(found.changed) == 6
    assert (found.only_first, found.only_second, found.differing) == ((), (), ())
    assert found.equal == 2
    from phyai_quant import load_quant_plan
    from phyai_quant.offline.files import read_checkpoint
    from phyai_quant.offline.layers import decide, find_layers

    plan = load_quant_plan(tmp_path / "out")
    stored = {x.name: x for x in find_layers(read_checkpoint(tmp_path / "out").tensors)}
    read = dequantize_layer(stored[LAYER], decide(plan, stored[LAYER]).scheme)
    a, b = weights[f"{LAYER}.weight"].double(), read.double()
    (row,) = [layer for layer in found.layers if layer.name == LAYER]
    assert row.sqnr_db == pytest.approx(-20 * math.log10((a - b).norm() / a.norm()))
    assert row.relative_l2 == pytest.approx(float((a - b).norm() / a.norm()))
    assert row.max_error == float((a - b).abs().max())
    assert row.bits == 4.25
    assert row.scheme == "mxfp4 block[1,32] micro-scaled"
    assert found.worst is min(found.layers, key=lambda layer: layer.sqnr_db)


def test_names_pair_without_their_root(weights, write_checkpoint):
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    renamed["layers.0.norm.weight"] = renamed["layers.0.norm.weight"] + 1
    del renamed["layers.1.q_proj.weight"]
    renamed["layers.1.k_proj.weight"] = torch.ones(2, 2)
    found = compare_checkpoints(write_checkpoint(weights), write_checkpoint(renamed, "other"))
    assert found.only_first == ("model.layers.1.q_proj",)
    assert found.only_second == ("layers.1.k_proj",)
    assert found.differing == ("model.layers.0.norm.weight",)
    assert found.equal == 1
    assert found.changed == ()


def test_extremes(weights, write_checkpoint):
    other = {name: tensor.clone() for name, tensor in weights.items()}
    other["model.layers.0.q_proj.weight"][0, 0] = torch.nan
    other["model.layers.0.o_proj.weight"] *= 0
    weights["model.layers.1.o_proj.weight"] = torch.zeros(4, 4)
    other["model.layers.1.o_proj.weight"] = torch.ones(4, 4)
    found = compare_checkpoints(write_checkpoint(weights), write_checkpoint(other, "other"))
    sqnr = {layer.name[6:]: layer.sqnr_db for layer in found.layers}
    assert math.isnan(sqnr["layers.0.q_proj"])
    assert sqnr["layers.0.o_proj"] == 0
    assert sqnr["layers.1.o_proj"] == -math.inf
    assert found.worst is not None
    assert found.worst.name in ("model.layers.0.q_proj", "model.layers.1.o_proj")


def test_other_models_are_refused(weights, write_checkpoint):
    dense = write_checkpoint(weights)
    alien = write_checkpoint({"x.weight": torch.ones(2, 2)}, "alien")
    with pytest.raises(QuantConfigError, match="have no layer in common"):
        compare_checkpoints(dense, alien)
    wide = write_checkpoint({**weights, f"{LAYER}.weight": torch.ones(3, 3)}, "wide")
    with pytest.raises(QuantConfigError, match=rf"{LAYER}: the weights have shapes \[64, 384\]"):
        compare_checkpoints(dense, wide)


def test_the_heat_map(dense, tmp_path, make_policy):
    quantize_checkpoint(dense, tmp_path / "out", make_policy({"dtype": "int8"}))
    layers = compare_checkpoints(dense, tmp_path / "out").layers
    cells = cells_of(layers)
    assert cells["1", "model.layers.*.down_proj"] == {x.name: x for x in layers}[LAYER].sqnr_db
    assert cells["-", "model.embed_tokens"] == math.inf
    draw_heatmap(layers, tmp_path / "map.png", title="$int8 against dense")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(QuantConfigError, match=r"use \.png"):
        draw_heatmap(layers, tmp_path / "map.xyz", title="")


def test_a_missing_matplotlib_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(QuantConfigError, match=r'pip install "phyai-quant\[cli\]"'):
        draw_heatmap([], tmp_path / "map.png", title="")
