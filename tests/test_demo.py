"""The demo runs to its end and shows what it promises."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def test_demo_compares_two_formats_and_draws_a_rollout(tmp_path):
    command = [sys.executable, "examples/pi05/reach/demo.py", "--episodes", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "convrot-int8" in text
    assert "piper.gemm.convrot_int8" in text
    assert "eager.attention_paged" in text
    picture = tmp_path / "rollout.png"
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 20_000
    sizes = {
        name: (tmp_path / f"weights-{name}.safetensors").stat().st_size
        for name in ("bf16", "convrot-int8")
    }
    assert sizes["convrot-int8"] < 0.75 * sizes["bf16"]
