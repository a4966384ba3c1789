"""What every process that computes makes: a warm runner and its batcher."""

from collections.abc import Callable

from phyai.serving.batching import Batcher
from phyai.serving.config import ServeConfig, ServerConfig
from phyai.serving.loading import load_policy
from phyai.serving.logs import event
from phyai.serving.runner import Runner


def load_runner(config: ServeConfig) -> Runner:
    """Load the policy of a configuration and warm it up; a GPU for the powers of two as batches."""
    policy = load_policy(config.policy)
    runner = Runner(policy)
    largest = config.server.max_batch
    powers = [1 << bit for bit in range(largest.bit_length())]
    on_gpu = str(policy.engine.describe()["device"]).startswith("cuda")
    sizes = sorted({*powers, largest}) if on_gpu and runner.batches else [1]
    seconds = runner.warm_up(sizes)
    event("warm", seconds=round(seconds, 3), batches=sizes)
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
    )
