"""The device checks refuse to run where their device is absent, and say what they found."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def device_run() -> ModuleType:
    """scripts/_device_run.py as a module."""
    spec = importlib.util.spec_from_file_location("_device_run", ROOT / "scripts/_device_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def machine(*, arch: str | None) -> SimpleNamespace:
    """A stand-in for torch on a machine with one device of an architecture, or with none."""
    amd = arch is not None and arch.startswith("gfx")
    digits = "0" if arch is None or amd else arch.removeprefix("sm")
    properties = SimpleNamespace(
        name="Device",
        total_memory=16 * 2**30,
        gcnArchName=f"{arch}:sramecc-",
        major=digits[:-1],
        minor=digits[-1],
    )
    return SimpleNamespace(
        __version__="2.14.1",
        version=SimpleNamespace(hip="7.0" if amd else None, cuda=None if amd else "13.0"),
        cuda=SimpleNamespace(
            is_available=lambda: arch is not None,
            device_count=lambda: 1,
            get_device_properties=lambda _: properties,
        ),
    )


@pytest.mark.parametrize(
    ("arch", "vendor", "wanted"),
    [
        ("sm90", "nvidia", ()),
        ("sm120", "nvidia", ("sm120",)),
        ("gfx1201", "amd", ("gfx1200", "gfx1201")),
    ],
)
def test_the_right_device_is_accepted(device_run, arch, vendor, wanted):
    torch = machine(arch=arch)
    assert device_run.require_device(torch, vendor=vendor, architectures=wanted) == arch
    assert arch in device_run.report(torch)


@pytest.mark.parametrize(
    ("arch", "vendor", "message"),
    [
        (None, "nvidia", "sees no device; this check needs one from nvidia"),
        ("gfx1201", "nvidia", "the device is from amd; this check is for nvidia"),
        ("sm90", "amd", "the device is from nvidia; this check is for amd"),
        ("gfx942", "amd", "the device is gfx942; this check is for gfx1200, gfx1201"),
    ],
)
def test_any_other_machine_is_refused(device_run, arch, vendor, message):
    wanted = ("gfx1200", "gfx1201") if vendor == "amd" else ()
    with pytest.raises(device_run.DeviceMissingError, match=message):
        device_run.require_device(machine(arch=arch), vendor=vendor, architectures=wanted)


@pytest.mark.parametrize("script", ["gpu_check.py", "run_rocm_regressions.py"])
def test_the_scripts_fail_instead_of_skipping(script):
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--collect-only"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "error: torch" in result.stderr
    assert "sees no device" in result.stderr
