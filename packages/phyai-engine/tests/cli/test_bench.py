"""``phyai bench``: what it refuses and what it prints."""

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
