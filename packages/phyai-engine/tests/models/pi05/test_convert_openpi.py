"""Checkpoints that Orbax wrote, converted, against the tensors that they were made of."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phyai.checkpoints import CheckpointError, CheckpointReader
from phyai.checkpoints.orbax import OrbaxReader
from phyai.cli import main
from phyai.models.pi05.convert_openpi import convert_openpi
from phyai.models.pi05.keys import EMBEDDING, canonical
from phyai.models.pi05.loading import load_pi05
from phyai.models.pi05.openpi_params import converted, parameter_name

pytest.importorskip("tensorstore", reason="tensorstore is not installed")

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ARRAYS = Path(__file__).with_name("orbax")
STATS = {"norm_stats": {"state": {"mean": [0.0], "std": [1.0]}}}


@pytest.fixture
def source(tmp_path):
    """A copy of the JAX checkpoint with the statistics of two robots."""
    folder = tmp_path / "jax"
    shutil.copytree(ARRAYS / "pi05", folder)
    for robot in ("trossen", "physical-intelligence/libero"):
        asset = folder / "assets" / robot
        asset.mkdir(parents=True)
        (asset / "norm_stats.json").write_text(json.dumps(STATS))
    return folder


def stored(family):
    """What the arrays were made of: fp32 tensors of π0, those of π0.5 rounded to bf16."""
    reader = CheckpointReader(FIXTURES / f"{family}_tiny", canonical)
    dtype = torch.bfloat16 if family == "pi05" else torch.float32
    found = {name: reader.get(name).to(dtype) for name in reader.shapes}
    embedding, head = EMBEDDING
    found[head] = found.pop(embedding)
    return found


def test_a_missing_tensorstore_says_how_to_get_it(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(CheckpointError, match=r'pip install "phyai-engine\[orbax\]"'):
        convert_openpi(source, tmp_path / "out", action_horizon=7)


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_every_tensor_is_the_one_it_was_made_of(family, tmp_path):
    done = convert_openpi(ARRAYS / family, tmp_path / "out", action_horizon=7)
    found, wanted = load_file(done.files[0]), stored(family)
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert done.tensors == len(wanted)
    assert done.parameters == sum(tensor.numel() for tensor in wanted.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"action_dim": 8, "action_horizon": 7}


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_the_engine_loads_the_result(family, tmp_path, load_model):
    convert_openpi(ARRAYS / family, tmp_path / "out")
    model, wanted = load_pi05(tmp_path / "out"), load_model(family)
    assert (model.config.family, model.config.chunk_size) == (family, 50)
    assert model.config.vision == wanted.config.vision
    for (name, found), given in zip(
        model.named_parameters(), wanted.parameters(), strict=True
    ):  # fmt: skip
        rounded = given.bfloat16().float() if family == "pi05" else given
        assert torch.equal(found, rounded), name


def test_shards_and_precision(source, tmp_path):
    done = convert_openpi(source, tmp_path / "out", dtype=torch.float16, shard_bytes=100_000)
    assert len(done.files) > 2
    assert [file.name for file in done.files] == sorted(
        file.name for file in (tmp_path / "out").glob("*.safetensors")
    )
    reader = CheckpointReader(tmp_path / "out", canonical)
    wanted = {canonical(name): tensor for name, tensor in stored("pi05").items()}
    assert set(reader.shapes) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(reader.get(name), tensor.half()), name
    assert done.assets == ("physical-intelligence/libero", "trossen")
    copied = tmp_path / "out" / "assets" / "trossen" / "norm_stats.json"
    assert json.loads(copied.read_text()) == STATS


def test_the_command(source, tmp_path, capsys):
    target = str(tmp_path / "out")
    assert main(["convert", "openpi", str(source), target, "--dtype", "bf16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["model.safetensors"]
    assert told["assets"] == ["physical-intelligence/libero", "trossen"]
    assert main(["convert", "openpi", str(source), target]) == 1
    assert "exists already" in capsys.readouterr().err


def test_what_is_no_such_checkpoint(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"no manifest\.ocdbt; expected .* calls params"):
        OrbaxReader(source)
    with pytest.raises(CheckpointError, match=r"is no parameter of π0 or π0\.5"):
        list(converted("PaliGemma.llm.layers.attn.q_einsum_2.w", torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"q_einsum\.w: shape \(3,\) does not fit"):
        list(converted("PaliGemma.llm.layers.attn.q_einsum.w", torch.zeros(3)))
    for file in (source / "params" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot be read|not a complete"):
        convert_openpi(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_names():
    assert parameter_name("params.action_in_proj.kernel.value") == "action_in_proj.kernel"
    assert parameter_name("action_in_proj.kernel") == "action_in_proj.kernel"
