"""Routed attention on Hopper binds every argument of its kernel; keys tell compiled ones apart."""

import pytest
import torch
from routed_cases import case

launch = pytest.importorskip("piper_kernels.attention._sm90_kernels.routed_launch")


@pytest.fixture
def launches(monkeypatch):
    found, names = [], launch._attend.kernel.arg_names

    def recorded(programs, arguments, options, key):
        found.append((programs, dict(zip(names, arguments, strict=True)), key))
        assert options["num_warps"] == launch.WARPS

    monkeypatch.setattr(launch, "_attend", recorded)
    return found


def attend(c, dtype=torch.float32, lengths=None):
    sums = torch.zeros((*c.prepared.value_multiplier.shape, 1), dtype=torch.int32)
    launch.attend(c.prepared, sums, launch.Routes(None, None, 0), c.rows, lengths, dtype)


def test_arguments_and_keys(launches):
    c, longer = (case(rows, 2, 1, 64, keep=1.0, blocks=4) for rows in (256, 320))
    lengths = torch.full((4,), 64, dtype=torch.int32)
    attend(c)
    attend(longer)
    attend(c, torch.bfloat16)
    attend(c, lengths=lengths)
    programs, arguments, key = launches[0]
    assert programs == 2 * 4
    assert (arguments["rows"], arguments["tiles"], arguments["heads"]) == (256, 4, 2)
    assert arguments["q_scale"] is c.prepared.query_scale
    assert (arguments["HAS_LENGTHS"], arguments["HAS_COARSE"]) == (False, False)
    assert launches[3][1]["lengths"] is lengths
    assert launches[1][2] == key is not None
    assert len({entry[2] for entry in launches}) == 3
