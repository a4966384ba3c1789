import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phyai_quant.cli import main

POLICY = "quantization:\n  rules:\n    - match: {glob: '*proj'}\n      weight: {dtype: int8}\n"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    folder = tmp_path / "dense"
    folder.mkdir()
    tensors = {
        f"layers.{i}.mlp.{name}_proj.weight": torch.randn(8, 64) for i in range(2) for name in "ab"
    }
    tensors["embed_tokens.weight"] = torch.randn(4, 64)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (tmp_path / "policy.yaml").write_text(POLICY)
    return folder


@pytest.fixture
def quantized(dense: Path, tmp_path: Path, capsys) -> Path:
    words = [
        "quantize",
        str(dense),
        str(tmp_path / "out"),
        "--policy",
        str(tmp_path / "policy.yaml"),
    ]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "4 layers: weight int8 per_channel, input unquantized, quantized on disk" in text
    assert "kept (embedding): embed_tokens" in text
    assert "1 shards, 9.0 KiB -> 3.2 KiB (35%)" in text
    return tmp_path / "out"


def run_json(capsys, *words: object, code: int = 0) -> dict:
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_inspect(quantized, dense, tmp_path, capsys):
    assert main(["inspect", str(quantized)]) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if "layers.1.mlp.b_proj" in line]
    assert "8x64" in row
    assert "int8 per_channel / a16" in row
    assert "4 of 5 layers with a weight matrix are quantized" in text
    assert main(["inspect", str(quantized), "--merge"]) == 0
    assert "layers.*.mlp.b_proj (2)" in capsys.readouterr().out
    document = run_json(capsys, "inspect", quantized)
    rows = {row["name"]: row for row in document["layers"]}
    row = rows["layers.0.mlp.a_proj"]
    assert (row["before"], row["after"]) == (2 * 8 * 64, 8 * 64 + 4 * 8 + 16)
    assert "config_groups.group_0.targets" in row["source"]
    planned = run_json(capsys, "inspect", dense, "--policy", tmp_path / "policy.yaml")
    again = {row["name"]: row for row in planned["layers"]}["layers.0.mlp.a_proj"]
    assert (again["before"], again["after"]) == (4 * 8 * 64, row["after"])
    assert again["rule"] == "glob *proj"
    assert document["bytes"]["after"] == planned["bytes"]["after"]


def test_validate(quantized, capsys):
    assert main(["validate", str(quantized)]) == 0
    assert "valid: 0 errors, 0 warnings" in capsys.readouterr().out
    file = quantized / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["validate", str(quantized)]) == 1
    text = capsys.readouterr().out
    assert "error [files] model.safetensors: truncated, 1 of" in text
    assert "invalid: 1 errors" in text
    assert run_json(capsys, "validate", quantized, code=1)["valid"] is False


def test_warnings_fail_when_asked(quantized, capsys):
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["ignore"].append("layers.7.x")
    (quantized / "config.json").write_text(json.dumps(config))
    assert main(["validate", str(quantized)]) == 0
    assert "matches no layer: name 'layers.7.x'" in capsys.readouterr().out
    assert main(["validate", str(quantized), "--strict"]) == 1


def test_compare(quantized, dense, tmp_path, capsys):
    picture = tmp_path / "map.png"
    assert main(["compare", str(dense), str(quantized), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "lowest SQNR" in text
    assert "1 layers have equal weights" in text
    assert picture.exists()
    document = run_json(capsys, "compare", dense, quantized, "--min-sqnr", 200, code=1)
    assert len(document["below"]) == 4
    assert {layer["sqnr_db"] for layer in document["layers"]} >= {"inf"}
    assert run_json(capsys, "compare", dense, dense)["below"] == []


def test_plan(quantized, tmp_path, capsys):
    policy = tmp_path / "policy.yaml"
    assert main(["plan", str(policy)]) == 0
    canonical = capsys.readouterr().out
    (tmp_path / "canonical.yaml").write_text(canonical)
    assert main(["plan", str(tmp_path / "canonical.yaml")]) == 0
    assert capsys.readouterr().out == canonical
    assert main(["plan", str(policy), "--layer", "x.a_proj"]) == 0
    assert "x.a_proj: weight int8 per_channel" in capsys.readouterr().out
    assert len(run_json(capsys, "plan", quantized)["rules"]) == 4
    explained = run_json(capsys, "plan", policy, "--layer", "x.norm")
    assert "no rule matched" in explained["layers"]["x.norm"][0]


def test_a_checkpoint_without_a_plan(dense, capsys):
    assert main(["plan", str(dense)]) == 0
    assert "declares no quantization" in capsys.readouterr().out
    assert run_json(capsys, "plan", dense)["rules"] == []


def test_quantize_reports_as_json(dense, tmp_path, capsys):
    words = ["quantize", dense, tmp_path / "out", "--policy", tmp_path / "policy.yaml"]
    document = run_json(capsys, *words)
    assert document["layout"] == "compressed-tensors"
    assert document["kept"] == {"embed_tokens": "embedding"}
    assert len(document["quantized"]) == 4
    assert document["bytes"]["before"] == 9216


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["inspect", "absent"], 1, "absent: is no folder"),
        (["inspect"], 2, "Missing argument"),
        (["inspekt"], 2, "No such command"),
        (["quantize", "{dense}", "{out}"], 2, "--policy"),
        (["quantize", "{dense}", "{out}", "--policy", "absent"], 1, "absent: cannot be read"),
        (
            ["quantize", "{dense}", "{out}", "--policy", "{policy}", "--device", "toaster"],
            2,
            "is no device",
        ),
        (["compare", "{dense}", "{dense}", "--picture", "no/such/folder/x.png"], 1, "No such file"),
        (["plan", "{policy}", "--layer", "a..b"], 1, "empty segment"),
    ],
)
def test_faults_are_one_line_and_a_code(dense, tmp_path, capsys, words, code, text):
    places = {"dense": dense, "out": tmp_path / "out", "policy": tmp_path / "policy.yaml"}
    assert main([word.format(**places) for word in words]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert text in captured.err
    assert "Traceback" not in captured.err


def test_errors_are_json_too(capsys):
    assert "is no folder" in run_json(capsys, "inspect", "absent", code=1)["error"]


def test_help_and_version_need_no_torch():
    code = (
        "import sys; from phyai_quant.cli import main; status = main(['--help']);"
        "heavy = {'torch', 'piper_kernels', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "quantize" in done.stdout
    assert main(["--version"]) == 0


def test_missing_packages_are_named():
    code = (
        "import sys; sys.modules['typer'] = None;"
        "from phyai_quant.cli import main; sys.exit(main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'hint: pip install "phyai-quant[cli]"' in done.stderr
    assert "Traceback" not in done.stderr
