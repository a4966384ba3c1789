"""What `phyai doctor` says about libraries and GPUs."""

import importlib.metadata
import types

import pytest
import torch

from phyai.cli import doctor
from phyai.cli.doctor import LIBRARIES, Gpu, Library, find_gpus, library_status

H200 = Gpu(0, "NVIDIA H200", "nvidia", "sm90", 90, 139.0)
TURING = Gpu(0, "T4", "nvidia", "sm75", 75, 15.0)
RADEON = Gpu(0, "Radeon", "amd", "gfx1201", None, 16.0)
TRITON = next(library for library in LIBRARIES if library.module == "triton")


def library(module: str, distribution: str = "pillow", min_sm: int | None = None) -> Library:
    return Library(module, distribution, "pictures", f"pip install {distribution}", min_sm)


@pytest.fixture
def quick_imports(monkeypatch):
    """Kernel libraries take seconds to import; what the command line itself needs is imported."""
    load, slow = importlib.import_module, {library.module for library in LIBRARIES}

    def quick(name, package=None):
        return None if name in slow else load(name, package)

    monkeypatch.setattr(doctor.importlib, "import_module", quick)


def test_a_library_that_imports_is_usable():
    status = library_status(library("PIL"), [])
    assert status.usable
    assert status.reason == ""
    assert status.version == importlib.metadata.version("pillow")


def test_a_missing_library_says_how_to_install_it():
    status = library_status(library("nothing", "no-such-distribution"), [H200])
    assert (status.usable, status.version) == (False, None)
    assert status.reason == "not installed; pip install no-such-distribution"


def test_extras_can_be_pasted_into_any_shell(phyai, monkeypatch, quick_imports):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    reasons = [entry["reason"] for entry in phyai("doctor", "--json").json["libraries"]]
    for extra in ("piper-kernels[convrot]", "phyai-engine[plot]", "phyai-engine[video]"):
        assert f'not installed; pip install "{extra}"' in reasons


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([], "needs an NVIDIA GPU of SM80 or newer; this machine has none"),
        ([RADEON], "needs an NVIDIA GPU of SM80 or newer; this machine has none"),
        ([TURING], "needs an NVIDIA GPU of SM80 or newer; the best here is SM75"),
        ([TURING, H200], ""),
    ],
)
def test_the_gpu_decides_before_anything_is_imported(gpus, reason):
    status = library_status(library("PIL", min_sm=80), gpus)
    assert status.reason == reason
    assert status.usable == (not reason)


def test_a_library_ruled_out_by_the_gpu_is_not_imported(monkeypatch):
    def forbidden(name):
        raise AssertionError(name)

    monkeypatch.setattr(doctor.importlib, "import_module", forbidden)
    assert not library_status(library("PIL", min_sm=80), []).usable


def test_triton_counts_amd_gpus(quick_imports):
    assert library_status(TRITON, [RADEON]).usable
    assert not library_status(TRITON, []).usable


def test_a_broken_library_gives_its_error(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.12: cannot open\nmore")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    status = library_status(library("PIL"), [])
    assert status.reason == "import fails: OSError: libcudart.so.12: cannot open"
    assert status.version is not None


def fake_cuda(monkeypatch, **properties):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**properties)
    )


def test_nvidia_gpus_are_found(monkeypatch):
    fake_cuda(monkeypatch, name="NVIDIA H200", major=9, minor=0, total_memory=139 * 2**30)
    assert find_gpus() == [H200]


def test_amd_gpus_are_found(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    fake_cuda(
        monkeypatch,
        name="Radeon",
        major=12,
        minor=0,
        gcnArchName="gfx1201:sramecc+",
        total_memory=16 * 2**30,
    )
    assert find_gpus() == [RADEON]


def test_the_json_report_is_complete(phyai, quick_imports):
    result = phyai("doctor", "--json")
    assert result.code == 0
    assert result.err == ""
    report = result.json
    assert report["torch"] == torch.__version__
    assert report["cpu_threads"] == torch.get_num_threads()
    assert [entry["name"] for entry in report["libraries"]] == [
        library.distribution for library in LIBRARIES
    ]
    for entry in report["libraries"]:
        assert entry["usable"] == (entry["reason"] == "")
    assert report["gpus"] or report["no_gpu_reason"]


def test_the_text_report_names_every_library_and_reason(phyai, monkeypatch, quick_imports):
    monkeypatch.setattr(doctor, "find_gpus", list)
    result = phyai("doctor")
    assert result.code == 0
    for entry in LIBRARIES:
        assert entry.distribution in result.out
    assert "this machine has none" in result.out
    assert f"torch          {torch.__version__}" in result.out
    assert "threads for torch" in result.out


def test_gpus_are_listed(phyai, monkeypatch, quick_imports):
    monkeypatch.setattr(doctor, "find_gpus", lambda: [H200])
    result = phyai("doctor")
    assert "cuda:0         NVIDIA H200, sm90, 139.0 GiB" in result.out
    assert "none" not in result.out
