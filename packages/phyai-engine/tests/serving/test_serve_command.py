"""``phyai serve`` and ``phyai replay``."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from phyai.cli import main
from phyai.cli import serve as command
from phyai.cli.errors import CliError
from phyai.client import PolicyClient
from phyai.dispatch import PolicyError
from phyai.engine_config import RuntimeConfig
from phyai.serving import read_config
from phyai.serving.replica_main import config_from_json, config_to_json

from .conftest import REACH

CONFIG = """
plugin: pi05
plugin_args: {checkpoint_dir: policy, num_steps: 2}
config: {device: {target: cpu, params_dtype: fp32}}
adapter: generic
server:
  port: 0
  api_key_file: key.txt
  default_prompt: reach the red disc
  max_batch: 2
  drain_s: 3600
  record: records
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policy").symlink_to(REACH)
    (tmp_path / "key.txt").write_text(" secret\n")
    (tmp_path / "server.yaml").write_text(CONFIG)
    return tmp_path


def test_check_prints_what_clients_are_told(folder, capsys):
    assert main(["serve", str(folder / "server.yaml"), "--check", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["shape"] == [16, 2]
    assert document["metadata"]["num_steps"] == 2
    assert document["metadata"]["adapter"] == "generic"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "neither a configuration nor a checkpoint"),
        (["--checkpoint", "nowhere"], "is not a folder"),
        (["--checkpoint", str(REACH), "--adapter", "arm"], "unknown adapter 'arm'"),
        (["--checkpoint", str(REACH), "--adapter", "nowhere.yaml"], "nowhere.yaml"),
        (["--checkpoint", str(REACH), "--api-key-file", os.devnull], "holds no API key"),
        (["--checkpoint", str(REACH), "--model", "pi9"], "no model plugin 'pi9'"),
    ],
)
def test_mistakes_are_named(words, reason, capsys):
    assert main(["serve", *words, "--check"]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--adapter", "arm"], "unknown adapter 'arm'"),
        (["--model", "pi9"], "no model plugin 'pi9'"),
        (["--adapter", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_mistakes_are_named_by_the_server_too(words, reason, capsys, monkeypatch):
    monkeypatch.setattr("phyai.serving.logs.log_as_json", lambda: None)  # for the whole process
    always = ["serve", "--checkpoint", str(REACH), "--device", "cpu", "--port", "0"]
    assert main([*always, *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert reason in said


def test_a_port_that_does_not_exist_is_a_usage_error(capsys):
    assert main(["serve", "--checkpoint", str(REACH), "--port", "70000"]) == 2
    said = capsys.readouterr().err
    assert "--port" in said
    assert "65535" in said


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("port: 0", "port: 70000", "no integer from 0 to 65535"),
        ("max_batch: 2", "max_batsch: 2", "unknown key 'max_batsch'"),
        ("params_dtype: fp32", "params_dtype: int4", "'int4'; allowed: fp32"),
        ("checkpoint_dir: policy, ", "", "'checkpoint_dir' is missing"),
    ],
)
def test_mistakes_in_a_configuration_are_named_with_their_line(folder, old, new, reason):
    file = folder / "server.yaml"
    file.write_text(CONFIG.replace(old, new))
    with pytest.raises(PolicyError) as raised:
        read_config(file)
    assert reason in str(raised.value)
    assert "server.yaml" in str(raised.value)


def test_a_configuration_is_read_and_the_key_stays_out_of_its_text(folder):
    config = read_config(folder / "server.yaml")
    assert config.policy.checkpoint == folder / "policy"
    assert config.server.api_key == "secret"
    assert "secret" not in repr(config)
    assert config.server.record == folder / "records"


def test_the_runtime_is_configured_and_replicas_are_told(folder):
    file = folder / "server.yaml"
    runtime = "runtime: {cuda_graphs: false, reuse_unchanged: true, lanes: 2}"
    file.write_text(CONFIG.replace("config: {", f"config: {{{runtime}, "))
    config = read_config(file)
    expected = RuntimeConfig(cuda_graphs=False, reuse_unchanged=True, lanes=2)
    assert config.policy.runtime == expected
    assert config_from_json(config_to_json(config)).policy == config.policy
    file.write_text(file.read_text().replace("lanes: 2", "lanes: 0"))
    with pytest.raises(PolicyError, match=r"server\.yaml.*no integer from 1 to 8"):
        read_config(file)


def test_options_win_over_the_file_and_the_variable_over_its_key(folder, monkeypatch):
    monkeypatch.setenv("PHYAI_API_KEY", "other")
    config = command.settle_config(folder / "server.yaml", {"adapter": "auto"}, {"port": 9}, None)
    assert (config.server.port, config.policy.adapter) == (9, "auto")
    assert config.server.api_key == "other"


@pytest.mark.parametrize("key", ["schlüssel", "two words", "tab\tbed"])
def test_a_key_that_no_header_holds_is_refused_and_not_printed(folder, monkeypatch, key):
    (folder / "key.txt").write_text(key, encoding="utf-8")
    for file in (folder / "server.yaml", folder / "key.txt"):
        keys = file if file.suffix == ".txt" else None
        config = None if keys else file
        with pytest.raises(CliError, match=r"key\.txt has blanks or characters beyond") as raised:
            command.settle_config(config, {"checkpoint": REACH}, {}, keys)
        assert key not in str(raised.value)
    monkeypatch.setenv("PHYAI_API_KEY", key)
    with pytest.raises(CliError, match="PHYAI_API_KEY has blanks"):
        command.settle_config(None, {"checkpoint": REACH}, {}, None)


def test_missing_libraries_are_named(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["serve", "--checkpoint", str(REACH)]) == 1
    printed = capsys.readouterr().err
    assert "serving needs msgpack, prometheus_client, websockets" in printed
    assert 'pip install "phyai-engine[serve]"' in printed


def test_a_server_answers_drains_on_sigterm_and_its_recording_is_replayed(folder, capsys):
    process = subprocess.Popen(
        [sys.executable, "-m", "phyai", "serve", str(folder / "server.yaml")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    events = []
    try:
        for line in process.stderr:
            events.append(json.loads(line))
            if events[-1]["event"] == "listening":
                break
        port = events[-1]["port"]
        picture = np.random.default_rng(0).integers(0, 256, (84, 84, 3), np.uint8)
        wire = {"images": {"base": picture, "wrist": picture}, "prompt": "reach the red disc"}
        wire["observation/state"] = np.zeros(4, np.float32)
        with PolicyClient(port=port, api_key="secret") as client:
            actions = [client.infer(wire, seed=seed)["actions"] for seed in (1, 2)]
            process.send_signal(signal.SIGTERM)
            # Nothing is in progress: the server does not wait for `drain_s`.
            assert process.wait(120) == 0
    finally:
        process.kill()
        rest = process.stderr.read()
        process.stderr.close()
    events += [json.loads(line) for line in rest.splitlines()]
    assert [event["event"] for event in events][-2:] == ["disconnected", "stopped"]
    assert "draining" in {event["event"] for event in events}
    assert not np.array_equal(*actions)
    replay = ["replay", str(folder / "records"), "--policy", str(folder / "server.yaml")]
    assert main([*replay, "--max-abs", "1e-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exchanges"] == 2
    assert main([*replay, "--against", str(REACH), "--max-abs", "1e-6"]) == 1
    printed = capsys.readouterr()
    assert "more than 1e-06" in printed.err
    assert "against" in printed.out
    assert main(["replay", str(folder), "--policy", str(REACH)]) == 1
    assert "exchanges.jsonl is missing" in capsys.readouterr().err
