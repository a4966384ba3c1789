import json

import pytest
import torch
from safetensors.torch import save_file

from phyai.checkpoints import CheckpointError, CheckpointReader


def write(path, **tensors):
    save_file(tensors, path)


def test_reads_shapes_dtypes_and_tensors(tmp_path):
    weight = torch.randn(3, 5)
    write(tmp_path / "model.safetensors", a=weight, b=torch.ones(2, dtype=torch.bfloat16))
    reader = CheckpointReader(tmp_path)
    assert reader.shapes == {"a": (3, 5), "b": (2,)}
    assert reader.dtypes == {"a": "F32", "b": "BF16"}
    assert torch.equal(reader.get("a"), weight)
    assert reader.bytes_on_disk() == (tmp_path / "model.safetensors").stat().st_size


def test_reads_all_shards_of_an_index(tmp_path):
    write(tmp_path / "x-1.safetensors", a=torch.zeros(1))
    write(tmp_path / "x-2.safetensors", b=torch.zeros(2))
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(CheckpointReader(tmp_path).shapes) == {"a", "b"}


def test_files_of_another_name_and_single_rows(tmp_path):
    table = torch.arange(20.0).view(5, 4)
    write(tmp_path / "part.safetensors", table=table)
    write(tmp_path / "model.safetensors", other=table)
    reader = CheckpointReader(tmp_path, stem="part")
    assert set(reader.shapes) == {"table"}
    assert torch.equal(reader.get_rows("table", (3, 0)), table[[3, 0]])
    with pytest.raises(CheckpointError, match=r"no gone\.safetensors and no gone\.safetensors\.i"):
        CheckpointReader(tmp_path, stem="gone")


def test_a_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"a": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors.*does not exist"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_outside_its_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not a file name"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: not a safetensors index"):
        CheckpointReader(tmp_path)


def test_canonical_names_and_left_out_tensors(tmp_path):
    write(tmp_path / "model.safetensors", **{"model.a": torch.zeros(1), "junk": torch.zeros(1)})
    reader = CheckpointReader(
        tmp_path, lambda name: None if name == "junk" else name.removeprefix("model.")
    )
    assert set(reader.shapes) == {"a"}
    assert reader.ignored == ["junk"]


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    write(tmp_path / "model.safetensors", **{"model.a": torch.zeros(1), "a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="are both the tensor a"):
        CheckpointReader(tmp_path, lambda name: name.removeprefix("model."))


@pytest.mark.parametrize("cut", [4, 40, -1])
def test_a_truncated_file_is_named(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    write(path, a=torch.randn(64))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete"):
        CheckpointReader(tmp_path)


def test_trailing_bytes_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, a=torch.randn(4))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("second", [(0, 4), (4, 8)])
def test_a_name_that_stands_twice_is_called_duplicate(tmp_path, second):
    entries = [
        f'"a": {{"dtype": "U8", "shape": [4], "data_offsets": {list(place)}}}'
        for place in ((0, 4), second)
    ]
    header = f"{{{', '.join(entries)}}}".encode()
    raw = len(header).to_bytes(8, "little") + header + bytes(second[1])
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has the duplicate key 'a'"):
        CheckpointReader(tmp_path)


def test_pickles_are_named_and_never_loaded(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which are pickles"):
        CheckpointReader(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        CheckpointReader(tmp_path / "nowhere")
