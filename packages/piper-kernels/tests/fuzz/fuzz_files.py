"""Cases of the fuzz of readers: a name, a seed and a number, which a random source is made from.

They take the variables of ``fuzz_cases``; the replay of a case is its text, such as ``gguf:0:17``.
"""

import math
import os
import random

QUICK_CASES = 400


def run_cases(name, share, check, test_file):
    """Run ``check(random source)`` for the share of all cases; return what the checks returned.

    A failure carries the line that repeats its case. When another case is replayed none runs.
    """
    replay = os.environ.get("PIPER_FUZZ_REPLAY")
    total = int(os.environ.get("PIPER_FUZZ_CASES", QUICK_CASES))
    seed = os.environ.get("PIPER_FUZZ_SEED", "0")
    cases = [f"{name}:{seed}:{number}" for number in range(max(1, math.ceil(total * share)))]
    if replay is not None:
        cases = [replay] if replay.startswith(f"{name}:") else []
    outcomes = []
    for case in cases:
        try:
            outcomes.append(check(random.Random(case)))
        except Exception as error:
            error.add_note(f"repro: PIPER_FUZZ_REPLAY={case} pytest {test_file}")
            raise
    return outcomes


def is_whole_run():
    """Whether shares of outcomes mean something: many cases ran, and none is replayed."""
    return (
        "PIPER_FUZZ_REPLAY" not in os.environ
        and int(os.environ.get("PIPER_FUZZ_CASES", QUICK_CASES)) >= QUICK_CASES
    )
