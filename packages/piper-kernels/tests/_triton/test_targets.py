import subprocess
import sys
import types

import pytest
import torch

from piper_kernels._triton import runtime, targets
from piper_kernels._triton.targets import AcceleratorTarget


@pytest.mark.parametrize(
    ("backend", "architecture", "capability", "fp4"),
    [
        ("cuda", "sm_80", (8, 0), False),
        ("cuda", "sm_90", (9, 0), False),
        ("cuda", "sm_100", (10, 0), True),
        ("cuda", "sm_120", (12, 0), True),
        ("cuda", "sm_121", (12, 1), True),
        ("hip", "gfx1201", (0, 0), False),
    ],
)
def test_target(backend, architecture, capability, fp4):
    target = AcceleratorTarget(backend, architecture)
    assert target.capability == capability
    assert target.has_fp4_conversion is fp4


@pytest.fixture
def device(monkeypatch):
    """Pretend that ``cuda:0`` is the given device."""

    def pretend(major=9, minor=0, hip=None):
        properties = types.SimpleNamespace(
            major=major, minor=minor, gcnArchName="gfx1201:sramecc+:xnack-"
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "hip", hip)
        targets._cuda_target.cache_clear()
        return torch.device("cuda", 0)

    yield pretend
    targets._cuda_target.cache_clear()


def test_targets_of_devices(device):
    assert targets.accelerator_target(device(12, 0)) == AcceleratorTarget("cuda", "sm_120")
    assert targets.accelerator_target(device(hip="6.4")) == AcceleratorTarget("hip", "gfx1201")
    assert targets.accelerator_target(torch.device("cpu")) is None
    assert targets.accelerator_target(torch.device("meta")) is None


def test_dot_precision(device):
    assert targets.dot_precision(device(9, 0)) == "tf32x3"
    assert targets.dot_precision(device(7, 5)) == "ieee"
    assert targets.dot_precision(device(hip="6.4")) == "ieee"
    assert targets.dot_precision(torch.device("cpu")) == "ieee"


def test_support_names_the_reason(device, monkeypatch):
    assert runtime.support(torch.device("cpu")) == (
        False,
        "Triton kernels need a CUDA or ROCm device, got cpu",
    )
    usable, reason = runtime.support(device(6, 1))
    assert not usable
    assert "sm_70 or newer" in reason
    assert "sm_61" in reason
    monkeypatch.setattr(runtime, "triton_is_installed", lambda: True)
    assert runtime.support(device(9, 0)) == (True, "")
    assert runtime.supports_device(device(hip="6.4"))
    monkeypatch.setattr(runtime, "triton_is_installed", lambda: False)
    usable, reason = runtime.support(device(9, 0))
    assert not usable
    assert 'pip install "piper-kernels[triton]"' in reason


def test_installation_check_hides_no_other_error():
    code = """
import sys
from piper_kernels._triton import row_chunks, runtime, targets

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

assert "triton" not in sys.modules
sys.meta_path.insert(0, Block())
missing = "triton"
assert not runtime.triton_is_installed()
runtime.triton_is_installed.cache_clear()
missing = "something_else"
try:
    runtime.triton_is_installed()
except ModuleNotFoundError as error:
    assert error.name == "something_else"
else:
    raise AssertionError("the error was swallowed")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
