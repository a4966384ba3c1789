"""``phyai bench``: what it refuses and what it prints."""

import json

import pytest

from phyai.cli import bench
from phyai.cli.app import main


def test_it_needs_a_gpu(capsys):
    assert main(["bench", "pi05", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "times CUDA graphs and the device is cpu" in said
    assert "NVIDIA GPU" in said


@pytest.mark.parametrize("batch", ["0", "33"])
def test_batches_have_limits(batch, capsys):
    assert main(["bench", "pi05", "--batch", batch]) == 2
    assert "--batch" in capsys.readouterr().err


def test_the_table_has_stages_floor_and_kernels(capsys):
    spent = {"p50": 2.0, "p99": 2.5, "p10": 1.9, "p90": 2.1}
    stages = ("vision", "prefix", "denoise", "chunk", "request")
    bench.show(
        [
            {
                "setting": {"name": "three views"},
                "ms": dict.fromkeys(stages, spent),
                "floor_ms": {"total": 1.25},
                "ratio": {"total": 1.6},
                "kernels": {"vision": 3, "prefix": 4, "denoise": 5},
                "longest": {"vision": [("some_kernel", 3, 17.5)]},
            }
        ]
    )
    said = capsys.readouterr().out
    for part in ("three views", "2.00", "2.50", "1.25", "1.60", "12", "some_kernel", "17.5 us"):
        assert part in said


def test_cosmos3_needs_a_gpu_or_a_tiny_model(capsys):
    assert main(["bench", "cosmos3", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "times a GPU and the device is cpu" in said
    assert "--floor" in said


@pytest.mark.parametrize(
    ("size", "low", "high"), [("nano", 490, 500), ("edge", 65, 75), ("super", 2150, 2200)]
)
def test_the_floor_of_cosmos3_is_the_arithmetic_of_its_sizes(capsys, size, low, high):
    assert main(["bench", "cosmos3", "--floor", "--size", size, "--json"]) == 0
    floor = json.loads(capsys.readouterr().out)["floor_ms"]
    assert low < floor["bf16"]["denoise"] < high
    assert floor["8 bits"]["total"] < floor["bf16"]["total"]
    assert floor["bf16"]["total"] == pytest.approx(sum(floor["bf16"].values()) / 2)
    assert main(["bench", "cosmos3", "--floor", "--size", size]) == 0
    assert f"{floor['bf16']['denoise']:.1f}" in capsys.readouterr().out


def test_a_tiny_cosmos3_is_timed_anywhere(capsys):
    command = ["bench", "cosmos3", "--device", "cpu", "--tiny", "--requests", "1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
    for stage in ("encode", "denoise", "total", "request"):
        assert float(rows[stage][1]) > 0
    assert float(rows["denoise"][4]) > 1, "faster than an H200"
    assert rows["request"][3] == "-"
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"] == "tiny"
