"""What every process that computes makes: a warm runner and its batcher."""

import os
import time
from collections.abc import Callable

import torch

from phyai.serving.batching import Batcher
from phyai.serving.config import ServeConfig, ServerConfig
from phyai.serving.loading import load_policy
from phyai.serving.logs import event
from phyai.serving.runner import Runner


def load_runner(config: ServeConfig) -> Runner:
    """Load the policy of a configuration and warm it up.

    On a GPU it is warm for powers of two as batches, the only ones that its batcher makes, and
    torch keeps to one thread of the host unless OMP_NUM_THREADS says otherwise.
    """
    policy = load_policy(config.policy)
    runner = Runner(policy)
    sizes = _recorded_sizes(runner, config.server) or [1]
    if runner.on_gpu and "OMP_NUM_THREADS" not in os.environ:
        # The host only copies and decodes; threads that other processes hold up would cost more.
        torch.set_num_threads(1)
    started = time.perf_counter()
    policy.engine.warm_up(sizes)
    runner.warm_up(sizes)
    event("warm", seconds=round(time.perf_counter() - started, 3), batches=sizes)
    return runner


def make_batcher(
    runner: Runner, config: ServerConfig, expected: Callable[[], int] | None = None
) -> Batcher:
    """Return the batcher of a runner, of one job at a time if its engine has no batches.

    Call it in a running event loop.

    Args:
        runner: What computes.
        config: Batch size, window and queue.
        expected: Returns how many requests could come at most at this moment.
    """
    return Batcher(
        runner.run,
        max_batch=config.max_batch if runner.batches else 1,
        window_s=config.batch_window_ms / 1e3,
        max_queue=config.max_queue,
        expected=expected,
        lanes=runner.lanes,
        sizes=_recorded_sizes(runner, config),
    )


def _recorded_sizes(runner: Runner, config: ServerConfig) -> list[int] | None:
    """Return the batches that a GPU records: powers of two and the largest."""
    if not (runner.on_gpu and runner.batches):
        return None
    powers = [1 << bit for bit in range(config.max_batch.bit_length())]
    return sorted({*powers, config.max_batch})
