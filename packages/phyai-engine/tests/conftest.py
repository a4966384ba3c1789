"""Fixtures of several folders: graphs recorded on the CPU, and seeded cases of fuzz tests.

``PHYAI_FUZZ_CASES`` is the number of cases of each test, ``PHYAI_FUZZ_SEED`` draws others, and
``PHYAI_FUZZ_REPLAY`` runs one case alone, as the repro line of a failure says.
"""

import os
import random
from collections.abc import Callable

import pytest


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
