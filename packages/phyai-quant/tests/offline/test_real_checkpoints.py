"""Checkpoints of the real tools are sound, and every layer of them has a weight format."""

from pathlib import Path

import pytest

from phyai_quant.offline.checks import check_checkpoint
from phyai_quant.offline.report import inspect_checkpoint

FIXTURES = Path(__file__).parent.parent / "fixtures"
CHECKPOINTS = sorted(file.parent for file in FIXTURES.glob("*/*/model.safetensors"))


@pytest.mark.filterwarnings("ignore:.*quantized KV cache")
@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_real_checkpoints_are_sound(folder: Path):
    report = check_checkpoint(folder)
    assert [finding for finding in report.findings if finding.severity == "error"] == []
    assert report.quantized > 0
    rows, _ = inspect_checkpoint(folder)
    assert len(rows) == report.layers
    quantized = [row for row in rows if row.scheme is not None]
    assert len(quantized) == report.quantized
    assert [row.spec for row in quantized if row.spec.startswith("none")] == []
    # tiny layers: scales weigh much, but codes are never as large as 16-bit weights
    assert sum(row.after for row in quantized) < 0.9 * sum(row.before for row in quantized)
