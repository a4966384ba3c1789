"""Exit codes, help, and what the command line loads."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from phyai.cli import app as application
from phyai.cli import main

PYTHON = Path(sys.executable)
REACH = Path(__file__).resolve().parents[4] / "examples" / "pi05" / "reach" / "checkpoint"
COMMANDS = [
    ["run"],
    ["run", "pi05"],
    ["eval"],
    ["eval", "reach"],
    ["explain"],
    ["inspect"],
    ["doctor"],
    ["policy"],
    ["policy", "check"],
    ["policy", "show"],
]


def test_help_lists_every_command(phyai):
    result = phyai("--help")
    assert result.code == 0
    for name in ("run", "eval", "explain", "inspect", "doctor", "policy"):
        assert f"│ {name} " in result.out
    assert "Exit codes" in result.out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(phyai, command):
    result = phyai(*command, "--help")
    assert result.code == 0
    assert "Usage: phyai " + " ".join(command) in result.out
    assert result.err == ""


def test_quant_hands_all_of_its_words_to_phyai_quant(phyai, monkeypatch):
    seen = []
    monkeypatch.setattr("phyai_quant.cli.main", lambda words: seen.append(words) or 1)
    words = ["quantize", "--policy", "a.yaml", "in", "-x", "out", "--json", "--help"]
    assert phyai("quant", *words).code == 1
    assert phyai("quant", "--help").code == 1
    assert seen == [words, ["--help"]]


def test_quant_checks_a_checkpoint(phyai):
    assert phyai("quant", "validate", REACH, "--json").json["valid"] is True
    assert phyai("quant", "nonsense").code == 2


@pytest.mark.parametrize("command", [[], ["run"], ["eval"], ["policy"]], ids=str)
def test_a_group_alone_shows_its_help_and_is_a_usage_error(phyai, command):
    result = phyai(*command)
    assert result.code == 2
    assert "Commands" in result.out
    assert "error:" not in result.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["walk"], "No such command 'walk'"),
        (["doctor", "--loud"], "No such option: --loud"),
        (["run", "pi05"], "Missing option '--checkpoint'"),
        (["policy", "check"], "Missing argument 'FILE'"),
        (["eval", "reach", "--episodes", "0"], "Invalid value for '--episodes'"),
        (["explain", "--dtype", "fp64", "--op", "gemm"], "'fp64' is not one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_wrong_command_line_is_exit_code_two_with_a_hint(phyai, command, words):
    result = phyai(*command)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert words in result.err
    assert "--help` lists what the command takes" in result.err


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["inspect", "nowhere", "--json"], 1, "nowhere"),
        (["inspect", "--json"], 2, "Missing argument 'DIR'"),
        (["doctor", "--json", "--loud"], 2, "No such option: --loud"),
        (["run", "pi05", "--checkpoint", "nowhere", "--json"], 2, "Missing option '--image'"),
        (["eval", "reach", "--checkpoint", "nowhere", "--json"], 1, "nowhere"),
        (["tune", "--checkpoint", "nowhere", "--json"], 1, "nowhere"),
        (["policy", "check", "nowhere.yaml", "--json"], 1, "nowhere.yaml"),
        (["policy", "show", "nowhere.yaml", "--json"], 1, "nowhere.yaml"),
        (["policy", "diff", "nowhere.yaml", "gone.yaml", "--json"], 1, "nowhere.yaml"),
        (["explain", "--json", "--op", "gem"], 1, "did you mean 'gemm'"),
        (["explain", "--op", "gem", "--format", "json"], 1, "did you mean 'gemm'"),
        (["explain", "--format=json", "--op", "gem"], 1, "did you mean 'gemm'"),
        (["explain", "--format", "json", "--dtype", "fp64"], 2, "'fp64' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_failing_command_with_json_still_prints_one_document(phyai, command, code, words):
    result = phyai(*command)
    assert result.code == code
    assert set(result.json) == {"error", "hint"}
    assert words in result.json["error"]
    assert result.json["error"] in result.err


def test_a_failing_command_without_json_prints_no_document(phyai):
    for form in ("text", "markdown"):
        assert phyai("explain", "--op", "gem", "--format", form).out == ""


def test_the_version_is_printed(phyai):
    result = phyai("--version")
    assert result.code == 0
    assert result.out.startswith("phyai 0.")


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def broken(**_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(application, "app", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])


def test_an_interrupt_is_exit_code_130(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(application, "app", interrupted)
    assert main(["doctor"]) == 130


def run_python(*argv: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [PYTHON, *argv], capture_output=True, text=True, env=environment, check=False, **options
    )


def children_seconds() -> float:
    """Processor time of finished child processes; other load on the machine does not count."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_loads_no_tensor_library_and_is_fast():
    code = (
        "import sys\n"
        "from phyai.cli import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'PIL', 'phyai_quant', 'ruamel'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    costs = []
    for _ in range(3):
        before = children_seconds()
        done = run_python("-c", code)
        costs.append(children_seconds() - before)
        assert done.returncode == 0, done.stderr
        assert done.stderr.strip() == "[]"
        if costs[-1] < 1.0:
            break
    # 0.35 s of processor time; loading torch alone takes seconds.
    assert min(costs) < 1.0


def test_python_m_phyai_is_the_same_program():
    done = run_python("-m", "phyai", "walk")
    assert done.returncode == 2
    assert "No such command 'walk'" in done.stderr


def test_a_reader_that_leaves_early_causes_no_traceback():
    code = "import sys; from phyai.cli import main; sys.exit(main(['--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [PYTHON, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
