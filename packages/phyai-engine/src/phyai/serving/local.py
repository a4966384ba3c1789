"""Serving with an engine in the server's own process."""

import asyncio
from collections.abc import Callable

from phyai.serving.batching import Batcher
from phyai.serving.config import ServeConfig, ServerConfig
from phyai.serving.loading import LoadedPolicy, load_policy
from phyai.serving.logs import event
from phyai.serving.runner import Runner


def ready_runner(policy: LoadedPolicy, max_batch: int, device: str) -> Runner:
    """Return a warmed-up runner.

    Args:
        policy: The engine and its adapter.
        max_batch: Largest batch that will come; a GPU is warmed up for the powers of two up to it.
        device: Where the engine runs.
    """
    runner = Runner(policy)
    powers = [1 << bit for bit in range(max_batch.bit_length())]
    sizes = sorted({*powers, max_batch}) if device.startswith("cuda") else [1]
    seconds = runner.warm_up(sizes)
    event("warm", seconds=round(seconds, 3), batches=sizes)
    return runner


def load_runner(config: ServeConfig) -> Runner:
    """Load the policy of a configuration and warm it up."""
    policy = load_policy(config.policy)
    device = str(policy.engine.describe()["device"])
    return ready_runner(policy, config.server.max_batch, device)


def make_batcher(
    runner: Runner, config: ServerConfig, expected: Callable[[], int] | None = None
) -> Batcher:
    """Return the batcher of a runner; call it in a running event loop.

    Args:
        runner: What computes.
        config: Batch size, window and queue.
        expected: Returns how many requests could come at most at this moment.
    """
    return Batcher(
        runner.run,
        max_batch=config.max_batch,
        window_s=config.batch_window_ms / 1e3,
        max_queue=config.max_queue,
        expected=expected,
    )


async def load_runner_async(config: ServeConfig) -> Runner:
    """Load the policy in a thread, so that the event loop goes on."""
    return await asyncio.to_thread(load_runner, config)
