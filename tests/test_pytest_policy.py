"""The rules of the root conftest.py, each seen from a pytest run of its own."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # noqa: F401 - pytester forgets what a test imports, and torch loads only once

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def shared_conftest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty test folder that has the repository's conftest.py and none of its settings."""
    for name in ("PYTEST_XDIST_AUTO_NUM_WORKERS", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    markers = "gpu: needs a device\n    device_memory(gib): needs that much memory"
    pytester.makeini(f"[pytest]\nmarkers =\n    {markers}\n")
    write_ledger(pytester, "failure = []")
    return pytester


def write_ledger(pytester: pytest.Pytester, text: str) -> None:
    """Replace the ledger of known failures."""
    folder = pytester.path / "tests"
    folder.mkdir(exist_ok=True)
    (folder / "known_failures.toml").write_text(text)


def workers_chosen(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cores: int,
    device: bool,
    override: str | None = None,
) -> int:
    """Return what ``-n auto`` comes to on a machine of ``cores`` cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: device)
    if override is not None:
        monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", override)
    config = pytester.parseconfigure("-p", "xdist")
    return config.hook.pytest_xdist_auto_num_workers(config=config)


@pytest.mark.parametrize(
    ("cores", "device", "expected"),
    [(1, False, 1), (2, False, 2), (16, False, 16), (17, False, 16), (96, False, 16)],
)
def test_auto_workers_on_cpu_are_the_cores_up_to_sixteen(
    shared_conftest, monkeypatch, cores, device, expected
):
    assert workers_chosen(shared_conftest, monkeypatch, cores=cores, device=device) == expected


@pytest.mark.parametrize(("cores", "expected"), [(2, 2), (8, 8), (9, 8), (96, 8)])
def test_auto_workers_on_gpu_are_the_cores_up_to_eight(
    shared_conftest, monkeypatch, cores, expected
):
    assert workers_chosen(shared_conftest, monkeypatch, cores=cores, device=True) == expected


@pytest.mark.parametrize("device", [False, True])
def test_environment_overrides_the_cap(shared_conftest, monkeypatch, device):
    chosen = workers_chosen(shared_conftest, monkeypatch, cores=4, device=device, override="40")
    assert chosen == 40


def test_gpu_test_is_skipped_with_the_reason_where_there_is_no_device(shared_conftest, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shared_conftest.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        def test_on_device():
            raise AssertionError("must not run")

        def test_anywhere():
            pass
        """
    )
    result = shared_conftest.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs a CUDA or ROCm device: this * build of torch * sees none"])


def test_gpu_test_runs_where_there_is_a_device(shared_conftest, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    shared_conftest.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        def test_on_device():
            pass
        """
    )
    shared_conftest.runpytest_inprocess().assert_outcomes(passed=1)


def test_large_device_memory_tests_never_overlap(shared_conftest):
    log = shared_conftest.path / "log.txt"
    shared_conftest.makepyfile(
        f"""
        import time
        import pytest

        def note(word):
            with open({str(log)!r}, "a") as file:
                file.write(word + "\\n")

        @pytest.mark.usefixtures("large_device_memory")
        @pytest.mark.parametrize("index", range(4))
        def test_large(index):
            note("begin")
            time.sleep(0.2)
            note("end")
        """
    )
    result = shared_conftest.runpytest_subprocess("-n2", "--dist=load")
    result.assert_outcomes(passed=4)
    assert log.read_text().split() == ["begin", "end"] * 4


def test_large_device_memory_is_released_after_a_failure(shared_conftest):
    shared_conftest.makepyfile(
        """
        import pytest

        @pytest.mark.usefixtures("large_device_memory")
        @pytest.mark.parametrize("fails", [True, False])
        def test_large(fails):
            assert not fails
        """
    )
    shared_conftest.runpytest_inprocess().assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize(
    ("memory", "outcome"), [(141, {"passed": 1}), (15, {"skipped": 1}), (None, {"skipped": 1})]
)
def test_a_test_says_how_much_memory_it_needs(shared_conftest, monkeypatch, memory, outcome):
    monkeypatch.setattr("torch.cuda.is_available", lambda: memory is not None)
    properties = SimpleNamespace(total_memory=(memory or 0) * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    shared_conftest.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.device_memory(gib=16)
        def test_large(large_device_memory):
            pass
        """
    )
    result = shared_conftest.runpytest_inprocess("-rs")
    result.assert_outcomes(**outcome)
    if memory == 15:
        result.stdout.fnmatch_lines("*needs 16 GiB of device memory, found 15*")


def test_a_test_that_needs_memory_must_run_alone(shared_conftest):
    shared_conftest.makepyfile(
        """
        import pytest

        @pytest.mark.device_memory(gib=16)
        def test_large():
            pass
        """
    )
    result = shared_conftest.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*must use the fixture large_device_memory*")


def test_workers_limit_their_threads(shared_conftest, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shared_conftest.makepyfile(
        """
        def test_threads():
            import torch

            assert torch.get_num_threads() == 1
        """
    )
    shared_conftest.runpytest_subprocess("-n1").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("body", "outcome"), [("assert False", {"xfailed": 1}), ("pass", {"failed": 1})]
)
def test_a_failure_of_the_ledger_must_still_fail(shared_conftest, body, outcome):
    shared_conftest.makepyfile(test_case=f"def test_it():\n    {body}\n")
    entry = '[[failure]]\ntest = "test_case.py::test_it"\nreason = "a known defect"\n'
    write_ledger(shared_conftest, entry)
    shared_conftest.runpytest_subprocess("-p", "no:xdist").assert_outcomes(**outcome)
