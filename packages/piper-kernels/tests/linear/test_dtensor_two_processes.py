"""Linears on shards of a quantized weight in two gloo processes; the worker is a script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("dtensor_worker.py")
CASES = [
    f"{kind}-{case}"
    for kind in ("replicated", "rows", "columns")
    for case in (
        "int8-eager",
        "int8-static-eager-bias",
        "int8-compiled-bias",
        "int8-inference",
        "nvfp4-eager-bias",
        "convrot-nvfp4-eager",
    )
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="gloo is missing"
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dtensor")
    process = subprocess.run(
        [sys.executable, str(WORKER), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads((folder / "result.json").read_text())


def test_every_case_ran(results):
    assert sorted(results) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_the_local_linears(results, case):
    assert results[case] == "ok", results[case]
