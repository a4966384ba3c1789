"""The checkpoints that serving is measured with."""

import importlib.util
import sys

from phyai.serving import PolicyConfig
from phyai.serving.loading import load_policy
from phyai.serving.runner import Runner

from .conftest import REPOSITORY


def test_a_random_checkpoint_can_be_served(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(REPOSITORY / "examples" / "pi05")])
    path = REPOSITORY / "scripts" / "write_random_checkpoint.py"
    spec = importlib.util.spec_from_file_location("write_random_checkpoint", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    config = importlib.import_module("reach.sizes").reach_config()
    script.write(tmp_path / "random", config, "cpu")
    runner = Runner(load_policy(PolicyConfig(tmp_path / "random", device="cpu")))
    actions = runner.run_one(runner.example(), seed=1).actions
    assert actions.shape == (16, 2)
    assert actions.std() > 0.01
