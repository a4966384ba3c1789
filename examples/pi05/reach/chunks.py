"""How a policy's chunks of actions are executed."""

CHUNK = 16
"""Actions that the policy predicts at once."""
ACTION_STEPS = 8
"""Actions of a chunk that are executed before the next look."""
_CHUNKS_PER_EPISODE = 1000


def chunk_seed(episode_seed: int, chunk: int) -> int:
    """Seed of the noise of one chunk; no two chunks of an evaluation share one."""
    return episode_seed * _CHUNKS_PER_EPISODE + chunk


def check_execute(execute: int) -> None:
    """Raise ValueError unless `execute` actions can be taken from a chunk."""
    if not 1 <= execute <= CHUNK:
        raise ValueError(
            f"execute is {execute}; a chunk has {CHUNK} actions, so choose 1 to {CHUNK}"
        )
