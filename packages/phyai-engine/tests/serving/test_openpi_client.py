"""The unmodified openpi-client against the server."""

import importlib.util

import pytest

from .conftest import REPOSITORY


def test_openpi_client_drives_the_reach_policy_like_the_engine_itself(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = REPOSITORY / "scripts" / "check_openpi_client.py"
    spec = importlib.util.spec_from_file_location("check_openpi_client", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    python = script.environment_python()
    if python is None:
        pytest.skip(
            "openpi-client can not be installed: it needs Python 3.10 to 3.12 and NumPy < 2"
        )
    found = script.compare(python, 3)
    assert int(found["numpy"].split(".")[0]) < 2
    assert found["metadata"]["action_horizon"] == 16
    assert found["socket"] == found["in_process"]
    assert sum(success for success, _ in found["socket"]) >= 2
