"""Device checks, flags against environment variables, and warm-up observations."""

import os

import numpy as np
import pytest
import torch

from phyai.cli import engines
from phyai.cli.engines import EngineRequest, flags_win, resolve_device, synthetic_observation
from phyai.cli.errors import CliError


@pytest.fixture
def gpus(monkeypatch):
    def set_count(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return set_count


def test_the_default_device_is_the_gpu_when_there_is_one(gpus):
    gpus(1)
    assert resolve_device(None) == "cuda"
    gpus(0)
    assert resolve_device(None) == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_devices_of_the_machine_pass(gpus, device):
    gpus(2)
    assert resolve_device(device) == device


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", "cpu:0", "nvidia:sm90", ""])
def test_unknown_devices_are_refused(gpus, device):
    gpus(2)
    with pytest.raises(CliError, match="unknown device") as caught:
        resolve_device(device)
    assert caught.value.hint == "use cpu, cuda or cuda:N"


def test_an_absent_gpu_says_why(gpus):
    gpus(0)
    with pytest.raises(CliError, match=r"device cuda is not usable: torch .* (GPU|built without)"):
        resolve_device("cuda")
    gpus(2)
    with pytest.raises(CliError, match="cuda:2 does not exist") as caught:
        resolve_device("cuda:2")
    assert caught.value.hint == "this machine has cuda:0..1"


def test_a_build_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "is built without CUDA and ROCm" in engines.no_gpu_reason()


def test_typed_flags_hide_variables_for_the_time_being(monkeypatch):
    monkeypatch.setenv("PHYAI_DEVICE", "cuda")
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", "a.yaml")
    monkeypatch.delenv("PHYAI_PARAMS_DTYPE", raising=False)
    typed = {"PHYAI_DEVICE": "cpu", "PHYAI_KERNEL_CONFIG": None, "PHYAI_PARAMS_DTYPE": "fp32"}
    with flags_win(typed):
        assert "PHYAI_DEVICE" not in os.environ
        assert os.environ["PHYAI_KERNEL_CONFIG"] == "a.yaml"
    assert os.environ["PHYAI_DEVICE"] == "cuda"
    assert "PHYAI_PARAMS_DTYPE" not in os.environ


def test_variables_come_back_after_an_error(monkeypatch):
    monkeypatch.setenv("PHYAI_DEVICE", "cuda")

    def fail():
        with flags_win({"PHYAI_DEVICE": "cpu"}):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["PHYAI_DEVICE"] == "cuda"


def test_a_missing_checkpoint_folder_is_named(tmp_path):
    with pytest.raises(CliError, match=r"nowhere does not exist"):
        engines.build_engine(EngineRequest(tmp_path / "nowhere"))
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CliError, match=r"is not a folder"):
        engines.build_engine(EngineRequest(file))


def test_a_bad_variable_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PHYAI_PARAMS_DTYPE", "fp64")
    with pytest.raises(CliError, match=r"environment: .*PHYAI_PARAMS_DTYPE.*fp64"):
        engines.build_engine(EngineRequest(tmp_path, device="cpu"))


def test_a_removed_variable_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PHYAI_ATTN_BACKEND", "fa2")
    with pytest.raises(CliError, match=r"environment: PHYAI_ATTN_BACKEND was removed"):
        engines.build_engine(EngineRequest(tmp_path, device="cpu"))


def test_the_warm_up_observation_has_the_sizes_of_the_checkpoint():
    class Sized:
        def describe(self):
            return {"image_resolution": [28, 42], "cameras": ["a", "b"], "state_dim": 5}

    first, again = synthetic_observation(Sized()), synthetic_observation(Sized())
    assert list(first.images) == ["a", "b"]
    assert first.images["a"].shape == (28, 42, 3)
    assert first.images["a"].dtype == np.uint8
    assert first.images["a"].std() > 50
    assert (first.images["a"] != first.images["b"]).any()
    np.testing.assert_array_equal(first.images["b"], again.images["b"])
    np.testing.assert_array_equal(first.state, np.zeros(5, np.float32))
    assert first.task
