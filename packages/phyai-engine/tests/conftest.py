"""Fixtures of several folders: graphs recorded on the CPU, and seeded cases of fuzz tests.

``PHYAI_FUZZ_CASES`` is the number of cases of each test, ``PHYAI_FUZZ_SEED`` draws others, and
``PHYAI_FUZZ_REPLAY`` runs one case alone, as the repro line of a failure says.
"""

import os
import random
from collections.abc import Callable

import pytest
import torch

from phyai.runtime import graphs


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Returns what runs a check for every case: ``fuzz(name, check, quick=100, share=(0, 1))``.

    ``name`` is what ``-k`` selects the test by, and cases are drawn from it. ``check`` takes a
    random source and tells whether what it made was accepted; the accepted share of all cases lies
    within ``share``. ``quick`` is the number of cases unless the environment says otherwise.
    """
    replay, seed = (os.environ.get(f"PHYAI_FUZZ_{name}") for name in ("REPLAY", "SEED"))

    def run(
        name: str,
        check: Callable[[random.Random], bool],
        quick: int = 100,
        share: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        count = int(os.environ.get("PHYAI_FUZZ_CASES", quick))
        cases = [f"{seed or 0}:{number}" for number in range(count)]
        accepted = 0
        for case in cases if replay is None else [replay]:
            try:
                accepted += check(random.Random(f"{name}:{case}"))
            except Exception as error:
                where = f"pytest {request.path} -k {name}"
                error.add_note(f"repro: PHYAI_FUZZ_REPLAY={case} {where}")
                raise
        if replay is None:
            assert share[0] <= accepted / count <= share[1]

    return run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], torch.Tensor]]:
    """Records graphs on the CPU; a replay calls the function again. Lists what was recorded."""
    functions: list[Callable[[], torch.Tensor]] = []

    def record(
        function: Callable[[], torch.Tensor], device: torch.device, pool: object
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        functions.append(function)
        output = function()
        return output, lambda: output.copy_(function())

    monkeypatch.setattr(graphs, "_cuda_device", lambda inputs: torch.device("cpu"))
    monkeypatch.setattr(graphs, "_run_on_side_stream", lambda function, device: function())
    monkeypatch.setattr(graphs, "_record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return functions
