"""Every kernel compiles for every target; ``docs/kernel-table.md`` says what it then needs.

``PIPER_WRITE_KERNEL_TABLE=1`` compiles for all targets, which takes minutes, and writes the page.
Without it the first case of each kernel is compiled for one target, which few other tests use.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from kernel_case import ALL, CUDA
from kernel_cases import CASES, package_kernels
from kernel_compiler import Usage, compile_kernel
from machine_code import TARGETS, unsupported

PAGE = Path(__file__).resolve().parents[4] / "docs" / "kernel-table.md"
WRITE = bool(os.environ.get("PIPER_WRITE_KERNEL_TABLE"))
BEGIN, END = "<!-- kernels -->", "<!-- end of kernels -->"


@pytest.fixture(scope="module")
def measured():
    """Usages by case and target, as the tests of this module find them."""
    return {}


def write_page(found):
    missing = [target for target in TARGETS if target not in {key[1] for key in found}]
    assert not missing, f"the table needs every target in one process, without {missing}"
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{table(found)}\n{END}{tail}", encoding="utf-8")


def table(found):
    header = ["kernel", *TARGETS]
    lines = [header, ["---"] * len(header)]
    for case in CASES:
        cells = [str(found[case.name, t]) if t in case.targets else "–" for t in TARGETS]
        lines.append([f"`{case.name}`", *cells])
    version = f"Triton {triton.__version__}."
    return version + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


@pytest.mark.parametrize("target", TARGETS if WRITE else ["gfx942"])
def test_every_kernel_compiles(target, measured, tmp_path, monkeypatch):
    if not WRITE:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if reason := unsupported(target):
        pytest.skip(reason)
    first = {case.kernel + case.module: case for case in reversed(CASES) if target in case.targets}
    failed = []
    for case in (case for case in CASES if target in case.targets):
        if not WRITE and case not in first.values():
            continue
        try:
            measured[case.name, target] = compile_kernel(case, target)
        except Exception as error:  # all failures in one report
            failed.append(f"{case.name}: {type(error).__name__}: {error}"[:300])
    assert not failed, "\n".join(failed)


def test_registers_are_read():
    case = next(case for case in CASES if case.kernel == "store_scales_kernel")
    for target in ("sm_90", "gfx1201"):
        if not unsupported(target):
            usage = compile_kernel(case, target)
            assert 4 <= usage.registers <= 64
            assert usage.spilled == 0


def test_a_spill_is_shown():
    assert str(Usage(255, 16, 0)) == "255 (16 spilled)"
    assert str(Usage(96, 0, 0)) == "96"
    assert str(Usage(None, None, 0)) == "compiles"
    assert str(Usage(None, None, 0, traps=True)) == "traps"


def test_every_kernel_has_a_case():
    different = {f"{case.module}.{case.kernel}" for case in CASES} ^ package_kernels()
    assert not different, f"give each kernel a KernelCase in kernel_cases.py: {different}"
    assert len({case.name for case in CASES}) == len(CASES)
    assert tuple(TARGETS) == ALL
    assert all(TARGETS[target].backend == "cuda" for target in CUDA)


def test_the_page_has_a_row_for_every_kernel(measured):
    if WRITE:
        write_page(measured)
    part = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    shown = {}
    for line in rows:
        name, *cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        shown[name.strip("`")] = dict(zip(TARGETS, cells, strict=True))
    missing = {case.name for case in CASES} ^ set(shown)
    assert not missing, f"write the page with PIPER_WRITE_KERNEL_TABLE=1: {sorted(missing)}"
    for case in CASES:
        for target, cell in shown[case.name].items():
            assert (cell != "–") == (target in case.targets), (case.name, target, cell)
    traps = {(name, t) for name, cells in shown.items() for t in cells if cells[t] == "traps"}
    assert not traps, f"these kernels compile to a trap: {sorted(traps)}"
