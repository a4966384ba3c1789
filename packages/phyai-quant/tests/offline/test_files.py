import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai_quant import QuantConfigError
from phyai_quant.offline.files import INDEX_FILE, read_checkpoint
from phyai_quant.offline.shard_writer import PARTIAL_SUFFIX, ShardWriter

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7, 2).bfloat16(),
    "c": torch.tensor(3, dtype=torch.int64),
    "d": torch.randn(4, 6).to(torch.float8_e4m3fn),
    "e": torch.empty(0, 4),
    "f": torch.tensor([True, False, True]),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.double(), b.double())


def test_tensors_are_read_whole_and_by_rows(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    found = read_checkpoint(tmp_path)
    assert found.problems == ()
    assert found.require_sound() is found
    for name, tensor in TENSORS.items():
        assert same(found.tensors[name].read(), tensor)
    assert same(found.tensors["b"].read_rows(2, 5), TENSORS["b"][2:5])
    assert same(
        found.tensors["d"].read_rows(3, 4), TENSORS["d"].float()[3:4].to(torch.float8_e4m3fn)
    )
    assert found.tensors["e"].read_rows(0, 0).shape == (0, 4)
    assert found.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_folders_without_weights_are_refused(tmp_path):
    with pytest.raises(QuantConfigError, match="is no folder"):
        read_checkpoint(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(QuantConfigError, match=r"holds no \.safetensors file"):
        read_checkpoint(tmp_path)


def broken(dense: Path, case: str) -> None:
    shard, index = dense / "model-2.safetensors", dense / INDEX_FILE
    data = json.loads(index.read_text())
    if case == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif case == "trailing":
        shard.write_bytes(shard.read_bytes() + b"x")
    elif case == "missing":
        shard.unlink()
    elif case == "lacks":
        data["weight_map"]["model.extra"] = shard.name
    elif case == "elsewhere":
        data["weight_map"]["model.layers.0.q_proj.weight"] = shard.name
    elif case == "twice":
        tensors = load_file(shard)
        save_file({**tensors, "model.layers.0.q_proj.weight": torch.ones(1)}, shard)
    elif case == "escape":
        data["weight_map"]["x"] = "../x.safetensors"
    index.write_text("{" if case == "index" else json.dumps(data))


@pytest.mark.parametrize(
    ("case", "place", "text"),
    [
        ("truncated", "model-2.safetensors", "truncated, 1 of"),
        ("trailing", "model-2.safetensors", "1 trailing bytes"),
        ("missing", "model-2.safetensors", "listed in model.safetensors.index.json but missing"),
        ("lacks", "model.extra", "places it in model-2.safetensors, which lacks it"),
        ("elsewhere", "model.layers.0.q_proj.weight", "but model-1.safetensors holds it"),
        ("twice", "model.layers.0.q_proj.weight", "stored twice: in model-1.safetensors"),
        ("escape", INDEX_FILE, "must map tensors to file names"),
        ("index", INDEX_FILE, "is no index with a weight_map"),
    ],
)
def test_damage_is_listed_and_refused(dense, case, place, text):
    broken(dense, case)
    found = read_checkpoint(dense)
    assert any(p.place == place and text in p.message and p.fatal for p in found.problems)
    with pytest.raises(QuantConfigError, match="the checkpoint is damaged"):
        found.require_sound()


def test_a_tensor_outside_the_index_is_a_warning(dense):
    index = dense / INDEX_FILE
    data = json.loads(index.read_text())
    del data["weight_map"]["model.layers.0.q_proj.weight"]
    index.write_text(json.dumps(data))
    (problem,) = read_checkpoint(dense).require_sound().problems
    assert (problem.place, problem.fatal) == ("model.layers.0.q_proj.weight", False)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    save_file({"a": torch.ones(64)}, tmp_path / "x.safetensors")
    entry = read_checkpoint(tmp_path).tensors["a"]
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(QuantConfigError, match="ends before its tensors do"):
        entry.read()


def test_the_writer_appends_pieces_in_any_order(tmp_path):
    file = tmp_path / "y.safetensors"
    infos = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    with ShardWriter(file, infos, {"format": "pt"}) as writer:
        writer.append("b", TENSORS["b"][:3])
        writer.append("a", TENSORS["a"].t().contiguous().t())
        for name in ("c", "e", "d", "f"):
            writer.append(name, TENSORS[name])
        writer.append("b", TENSORS["b"][3:])
        assert not file.exists()
    loaded = load_file(file)
    assert loaded.keys() == TENSORS.keys()
    assert all(same(loaded[name], tensor) for name, tensor in TENSORS.items())
    found = read_checkpoint(tmp_path).require_sound()
    assert found.metadata == {file.name: {"format": "pt"}}


def test_the_writer_refuses_too_much_and_too_little(tmp_path):
    file = tmp_path / "y.safetensors"
    with (
        pytest.raises(RuntimeError, match="a: more elements"),
        ShardWriter(file, {"a": (torch.float32, (2,))}, {}) as writer,
    ):
        writer.append("a", torch.ones(3))
    with (
        pytest.raises(RuntimeError, match="a: fewer elements"),
        ShardWriter(file, {"a": (torch.float32, (2,))}, {}) as writer,
    ):
        writer.append("a", torch.ones(1))
    assert not file.exists()
    assert file.with_name(file.name + PARTIAL_SUFFIX).exists()
    with pytest.raises(RuntimeError, match="outside of its context"):
        ShardWriter(file, {"a": (torch.float32, (2,))}, {}).append("a", torch.ones(1))
