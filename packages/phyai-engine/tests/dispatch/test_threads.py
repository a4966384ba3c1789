"""Selectors and call sites under many threads while policies, devices and frozen sites change."""

import contextlib
import sys
import threading
import time
from collections import Counter

import pytest
import torch

from phyai.dispatch import (
    CallSite,
    FrozenChoiceError,
    KernelQuery,
    Selector,
    policy_from_mapping,
    set_kernel_selector,
)

THREADS = 16
CPU = torch.device("cpu")
PLAIN = {"format": "bf16"}
ROTATED = {"format": "bf16", "layout": "rotated"}


class Signature:
    """A weight's signature as layers hold it: one object, compared by identity."""

    block_shape = granularity = None
    fields = ()

    def __init__(self, layout=None):
        self.format, self.layout = "bf16", layout


SIGNATURES = (Signature(), Signature("rotated"))
# What policy number n chooses for each signature; neighbours differ everywhere.
CHOICES = (("fast.toy", "slow.toy"), ("slow.toy", "fast.toy"))


@pytest.fixture
def policies(toy):
    return [
        policy_from_mapping(
            {
                "rules": [
                    {"match": {"quant.layout": None}, "restrict_to": plain},
                    {"match": {"quant.layout": "rotated"}, "restrict_to": rotated},
                ]
            },
            catalog=toy,
        )
        for plain, rotated in CHOICES
    ]


@pytest.fixture(autouse=True)
def _switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Swaps:
    """Counts changes, so that a caller knows which ones its answer may come from."""

    def __init__(self):
        self.begun = self.done = 0

    def change(self, apply):
        self.begun += 1
        apply(self.begun)
        self.done = self.begun


def run_threads(*workers):
    """Run every worker until one fails or all return; re-raise the first failure."""
    failures = []

    def guarded(worker):
        try:
            worker()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if failures:
        raise failures[0]


def swapping(selector, policies, swaps, rounds=30):
    def work():
        for _ in range(rounds):
            swaps.change(lambda number: setattr(selector, "policy", policies[number % 2]))
            time.sleep(0.001)
        swaps.finished = True

    swaps.finished = False
    return work


def asking(swaps, ask, seen):
    """Ask until the swaps end; each answer belongs to a policy in force during the question."""

    def work():
        turn = 0
        while not swaps.finished:
            which = turn % 2
            turn += 1
            before = swaps.done
            kernel_id = ask(which, turn)
            allowed = {CHOICES[number % 2][which] for number in range(before, swaps.begun + 1)}
            assert kernel_id in allowed, f"policy {before}..{swaps.begun}: {kernel_id}"
            seen[kernel_id] += 1

    return work


def test_a_site_never_answers_for_a_policy_that_is_gone(toy, policies):
    selector = Selector(toy, policies[0], device="cpu")
    set_kernel_selector(selector)
    site, swaps, seen = CallSite("toy"), Swaps(), Counter()

    def ask(which, turn):
        selection = site.select(
            device=CPU,
            dtype={"input": torch.bfloat16},
            quant=SIGNATURES[which],
            dims={"M": turn % 5},
        )
        assert selection.execute() == selection.kernel_id
        return selection.kernel_id

    def freezing():
        while not swaps.finished:
            with contextlib.suppress(FrozenChoiceError):
                other.freeze()
            other.unfreeze()

    def asking_frozen():
        while not swaps.finished:
            before = swaps.done
            kernel_id = other.select(
                device=CPU, dtype={"input": torch.bfloat16}, quant=SIGNATURES[0]
            ).kernel_id
            assert kernel_id in {
                CHOICES[number % 2][0] for number in range(before, swaps.begun + 1)
            }

    other = CallSite("toy", role="frozen")
    workers = [asking(swaps, ask, seen) for _ in range(THREADS)]
    run_threads(swapping(selector, policies, swaps), freezing, asking_frozen, *workers)
    assert min(seen["fast.toy"], seen["slow.toy"]) > 0


def test_a_selector_never_answers_for_a_policy_that_is_gone(toy, policies):
    selector = Selector(toy, policies[0], device="cpu")
    swaps, seen = Swaps(), Counter()
    queries = [
        KernelQuery.build("toy", device="cpu", dtype="bf16", quant=quant)
        for quant in (PLAIN, ROTATED)
    ]

    def ask(which, turn):
        if turn % 3:
            return selector.select(queries[which]).kernel_id
        return selector.explain(queries[which]).selected

    workers = [asking(swaps, ask, seen) for _ in range(THREADS)]
    run_threads(swapping(selector, policies, swaps), *workers)
    assert min(seen["fast.toy"], seen["slow.toy"]) > 0


def test_a_change_of_device_reaches_every_thread(toy):
    selector = Selector(toy, device="cpu")
    set_kernel_selector(selector)
    site, swaps = CallSite("toy"), Swaps()
    devices = [("cpu", None), ("nvidia", "sm90")]

    def changing():
        for _ in range(30):
            swaps.change(
                lambda number: setattr(
                    selector, "device", ":".join(filter(None, devices[number % 2]))
                )
            )
            time.sleep(0.001)
        swaps.finished = True

    def work():
        while not swaps.finished:
            before = swaps.done
            facts = site.select(dtype={"input": torch.bfloat16}).facts
            seen = (facts["device.vendor"], facts["device.arch"])
            assert seen in {devices[number % 2] for number in range(before, swaps.begun + 1)}

    swaps.finished = False
    run_threads(changing, *[work] * THREADS)


def test_one_question_of_many_threads_prepares_once(toy, recorder):
    selector = Selector(toy, device="cpu")
    set_kernel_selector(selector)
    site, gate, found = CallSite("toy"), threading.Barrier(THREADS), []

    def work():
        gate.wait()
        found.append(site.select(device=CPU, dtype={"input": torch.bfloat16}))

    run_threads(*[work] * THREADS)
    assert len(recorder.prepared) == 1
    assert len({id(selection) for selection in found}) == 1
