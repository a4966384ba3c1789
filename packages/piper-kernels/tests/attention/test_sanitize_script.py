"""The script that runs compute-sanitizer over attention calls, with a sanitizer that pretends."""

import importlib.util
import stat
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "sanitize_attention.py"


RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at {kernel}+0x110 in {file}:{first}
=========     and Write access at {kernel}+0x118d0 in {file}:{first} [33 hazards]
=========     and Write access at {kernel}+0x22010 in {file}:{second} [18 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""
FOLDERS = {"control": SCRIPT.parent, "attention": SCRIPT.parents[1].joinpath(
    "packages/piper-kernels/src/piper_kernels/attention/_sm90_kernels"
)}  # fmt: skip


def report(kernel, *, shift=0):
    """Return what racecheck says of a kernel that is split, at other lines with ``shift``."""
    folder = FOLDERS["control" if kernel == "warp_groups_kernel" else "attention"]
    [path] = [path for path in folder.glob("*.py") if f"def {kernel}(" in path.read_text()]
    lines = path.read_text().splitlines()
    first = next(n for n, line in enumerate(lines, 1) if line.startswith(f"def {kernel}("))
    second = next(n for n, line in enumerate(lines, 1) if n > first and "warp_specialize(" in line)
    return RACE.format(kernel=kernel, file=path.name, first=first, second=second + shift)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("sanitize_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pretend(tmp_path):
    """Return a function that makes a sanitizer which logs its arguments and exits."""

    def make(status):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\necho said\nexit {status}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_every_tool_watches_every_call(script, pretend, tmp_path, capsys):
    assert script.main(["--sanitizer", pretend(0)]) == 0
    log = (tmp_path / "log").read_text().splitlines()
    assert len(log) == 2 * len(script.calls())
    for name in script.calls():
        for tool in ("memcheck", "racecheck"):
            assert any(f"--tool={tool} " in line and line.endswith(f"--run {name}") for line in log)
    assert capsys.readouterr().out.count("clean ") == len(log)


def test_what_a_tool_finds_fails(script, pretend, capsys):
    arguments = ["--sanitizer", pretend(script.ERROR_STATUS), "--calls", "D64 minmax"]
    assert script.main([*arguments, "--tools", "racecheck"]) == 1
    assert capsys.readouterr().out == "FAILED racecheck sparse D64 minmax: said\n"


@pytest.fixture
def racing(tmp_path):
    """Return a function that makes a racecheck which says one text of control, another of calls."""

    def make(status, call, control):
        path = tmp_path / "compute-sanitizer"
        for name, text in (("call", call), ("control", control)):
            (tmp_path / name).write_text(text + "\n")
        path.write_text(
            f'#!/bin/sh\ncase "$*" in *"--run control") cat {tmp_path}/control;;'
            f" *) cat {tmp_path}/call;; esac\nexit {status}\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return ["--sanitizer", str(path), "--calls", "sage_attention_2pp D64 full"]

    return make


@pytest.mark.parametrize("kernel", ["dense_attention_kernel", "routed_attention_kernel"])
def test_the_hand_over_of_triton_is_no_race(script, racing, capsys, kernel):
    control = report("warp_groups_kernel")
    arguments = racing(script.ERROR_STATUS, report(kernel), control)
    assert script.main([*arguments, "--tools", "racecheck"]) == 0
    assert "clean  racecheck" in (said := capsys.readouterr().out)
    assert "only Triton's hand-over" in said
    # The same reports of a memory check, or with the status of a failed call, are errors.
    assert script.main([*arguments, "--tools", "memcheck"]) == 1
    arguments = racing(1, report(kernel), control)
    assert script.main([*arguments, "--tools", "racecheck"]) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda call, control: (report("dense_attention_kernel", shift=5), control),
        lambda call, control: (call, "========= RACECHECK SUMMARY: 0 hazards displayed"),
        lambda call, control: (call.replace("1 hazard displayed", "2 hazards displayed"), control),
        lambda call, control: (call.replace(" in dense.py", " in other.py"), control),
        lambda call, control: (call.replace(" in dense.py:", " at "), control),
        lambda call, control: ("=========     no summary", control),
    ],
    ids=["another line", "not in the control", "one not shown", "another file", "no line", "none"],
)
def test_other_races_fail(script, racing, capsys, change):
    call, control = change(report("dense_attention_kernel"), report("warp_groups_kernel"))
    arguments = racing(script.ERROR_STATUS, call, control)
    assert script.main([*arguments, "--tools", "racecheck"]) == 1
    assert "FAILED racecheck" in capsys.readouterr().out


def test_the_control_compiles_for_hopper(script):
    triton = pytest.importorskip("triton")
    runtime = pytest.importorskip("triton.experimental.gluon._runtime")
    from _warp_groups import WARPS, warp_groups_kernel
    from triton.backends.compiler import GPUTarget

    source = runtime.GluonASTSource(
        warp_groups_kernel, dict.fromkeys(("x", "out"), "*fp32"), {}, None
    )
    options = {"num_warps": WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert ptx.count("st.global") == 3
    # What racecheck loses count of: barriers of all warps and barriers of a group.
    assert "barrier.sync" in ptx
    assert {"bar.sync \t0, 128;", "bar.sync \t2, 128;"} <= {
        line.strip() for line in ptx.splitlines()
    }


def test_no_sanitizer_is_said(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "find_sanitizer", lambda: None)
    assert script.main([]) == 2
    assert "--sanitizer" in capsys.readouterr().err


def test_a_text_that_no_call_contains_is_an_error(script, pretend, capsys):
    assert script.main(["--sanitizer", pretend(0), "--calls", "D96"]) == 2
    assert "no call contains ['D96']; calls: piper_attention D64 full" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_calls_run(script):
    for name in script.calls():
        script.run_call(name)
