"""The device checks refuse to run where their device is absent, and say what they found."""

import importlib.util
import json
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


@pytest.fixture
def rocm(monkeypatch) -> ModuleType:
    """scripts/run_rocm_regressions.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    path = ROOT / "scripts/run_rocm_regressions.py"
    spec = importlib.util.spec_from_file_location("run_rocm_regressions", path)
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


def test_the_machine_report_can_be_read_by_tools(device_run):
    found = json.loads(json.dumps(device_run.machine(machine(arch="gfx1201"))))
    assert found["architecture"] == "gfx1201"
    assert (found["hip"], found["cuda"], found["gpu"]) == ("7.0", None, "Device")
    assert {"checkout", "python", "executable", "torch", "triton", "torchao", "pytest"} <= set(
        found
    )
    assert found["checkout"] == str(ROOT)


def test_operations_without_kernels_are_refused(device_run):
    device_run.require_kernels({"INT8 linear": (True, "")})
    support = {"INT8 linear": (True, ""), "INT8 Conv3D": (False, "Triton is not installed")}
    message = "operations without kernels here: INT8 Conv3D: Triton is not installed"
    with pytest.raises(device_run.DeviceMissingError, match=message):
        device_run.require_kernels(support)


@pytest.fixture
def on_rdna4(device_run, monkeypatch):
    """Run device tests as if there was an RDNA4 device; returns what runs them."""
    import torch

    fake = machine(arch="gfx1201")
    monkeypatch.setattr(torch, "version", fake.version)
    monkeypatch.setattr(torch, "cuda", fake.cuda)
    monkeypatch.setattr(device_run, "use_this_checkout", lambda: None)

    def run(status, count, support=None, arguments=()):
        def tests(given, plugins):
            plugins[0].count = count
            assert given[:2] == ["-m", "gpu"]
            assert given[-len(arguments) :] == list(arguments) or not arguments
            return status

        monkeypatch.setattr(pytest, "main", tests)
        return device_run.run_device_tests(
            arguments, vendor="amd", architectures=("gfx1201",), support=support
        )

    return run


def test_a_run_that_skips_everything_fails(on_rdna4, capsys):
    assert on_rdna4(status=0, count=3) == 0
    assert '"architecture": "gfx1201"' in capsys.readouterr().out
    assert on_rdna4(status=0, count=0) == 2
    assert "every test was skipped" in capsys.readouterr().err
    assert on_rdna4(status=1, count=0) == 1
    assert on_rdna4(status=0, count=0, arguments=("--collect-only",)) == 0


def test_a_missing_kernel_fails_before_tests_are_collected(on_rdna4, capsys):
    assert on_rdna4(status=0, count=3, support=lambda: {"INT8 Conv3D": (False, "why")}) == 2
    assert "INT8 Conv3D: why" in capsys.readouterr().err


def test_tests_that_ran_are_counted(device_run):
    counter = device_run.RanSomething()
    for when, skipped in (("setup", True), ("call", True), ("call", False), ("teardown", False)):
        counter.pytest_runtest_logreport(SimpleNamespace(when=when, skipped=skipped))
    assert counter.count == 1


def test_the_rocm_suite(rocm, monkeypatch):
    calls = []
    monkeypatch.setattr(rocm, "run_device_tests", lambda args, **rest: calls.append((args, rest)))
    assert all((ROOT / path).is_dir() for path in rocm.SUITE)
    rocm.main(["-k", "sparse_gqa"])
    rocm.main(["packages/piper-kernels/tests/conv3d", "-x"])
    assert calls[0][0] == [*rocm.SUITE, "-k", "sparse_gqa"]
    assert calls[1][0] == ["packages/piper-kernels/tests/conv3d", "-x"]
    assert calls[0][1]["architectures"] == ("gfx1200", "gfx1201")
    assert rocm.any_support([(False, "a"), (True, "")]) == (True, "")
    assert rocm.any_support([(False, "a"), (False, "b")]) == (False, "a; b")


def test_all_operations_of_rdna4_have_kernels(rocm, monkeypatch):
    """The predicates that the script asks answer yes for the architecture."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from piper_kernels._triton import targets

    found = targets.AcceleratorTarget("hip", "gfx1201")
    monkeypatch.setattr(targets, "_cuda_target", lambda index: found)
    support = rocm.rdna4_support()
    assert len(support) == 10
    assert {name: reason for name, (usable, reason) in support.items() if not usable} == {}


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("gpu_check.py", ["--collect-only"]),
        ("gpu_check.py", ["--benchmarks-only"]),
        ("run_rocm_regressions.py", ["--collect-only"]),
    ],
)
def test_the_scripts_fail_instead_of_skipping(script, arguments):
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "error: torch" in result.stderr
    assert "sees no device" in result.stderr


@pytest.fixture
def benchmark_runs(monkeypatch) -> ModuleType:
    """scripts/_benchmark_runs.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "_benchmark_runs", raising=False)
    return importlib.import_module("_benchmark_runs")


def test_every_benchmark_and_page_is_run(benchmark_runs):
    stored = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("benchmark_*.py", "run_all.py")
        for path in ROOT.glob(f"packages/*/benchmarks/{pattern}")
    }
    assert {run.script for run in benchmark_runs.RUNS} | benchmark_runs.NEED_MORE.keys() == stored
    pages = {
        p.relative_to(ROOT).as_posix() for p in ROOT.glob("packages/*/benchmarks/[!_]*_page.py")
    }
    assert pages <= {run.script for run in benchmark_runs.PAGES}


def test_the_files_that_benchmarks_are_given_exist(benchmark_runs):
    for run in (*benchmark_runs.RUNS, *benchmark_runs.PAGES):
        words = run.command("nvidia-h200")[1:]
        files = [word for word in words if word.endswith((".py", ".yaml"))]
        assert [file for file in files if not (ROOT / file).is_file()] == []
        source = (ROOT / run.script).read_text(encoding="utf-8")
        options = [word for word in run.arguments if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == []


def test_a_failing_benchmark_does_not_stop_the_next(benchmark_runs, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(benchmark_runs, "ROOT", tmp_path)
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "works.py").write_text("import sys; print('measured on', sys.argv[1])")
    runs = [benchmark_runs.Run("broken.py", 60), benchmark_runs.Run("works.py", 60, ("{device}",))]
    assert benchmark_runs.run_benchmarks("nvidia-x", runs) == 1
    said = capfd.readouterr()
    assert "measured on nvidia-x" in said.out
    assert said.err == "failed: broken.py\n"
    assert benchmark_runs.run_benchmarks("nvidia-x", runs[1:]) == 0
