"""Recorded traffic answered again, and how far two sets of answers are apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phyai.serving.jobs import Answer
from phyai.serving.recording import Exchange
from phyai.serving.runner import Runner


@dataclass(frozen=True)
class Difference:
    """Two answers to one recorded request.

    Attributes:
        index: Position in the recording.
        max_abs: Largest difference of an action, in the robot's units.
        rmse: Root of the mean square difference.
        cosine: Of the two chunks as vectors; 1 when both are zero.
    """

    index: int
    max_abs: float
    rmse: float
    cosine: float


def replay(exchanges: Iterable[Exchange], runner: Runner) -> list[np.ndarray]:
    """Answer recorded requests one at a time, with their own seeds or noise.

    Args:
        exchanges: A recording.
        runner: The policy.

    Returns:
        The actions [chunk, action_dim] of each.

    Raises:
        RequestError, ProcessingError, EngineFailureError: A request can not be answered.
    """
    answers = []
    for exchange in exchanges:
        (outcome,) = runner.run([exchange.job])
        if not isinstance(outcome, Answer):
            raise outcome
        answers.append(outcome.actions)
    return answers


def difference(index: int, actions: np.ndarray, reference: np.ndarray) -> Difference:
    """Compare two chunks.

    Raises:
        ValueError: Their shapes differ.
    """
    if actions.shape != reference.shape:
        raise ValueError(
            f"exchange {index}: actions have shape {actions.shape}, the reference has "
            f"{reference.shape}; compare policies of one robot"
        )
    one, two = actions.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    apart = np.abs(one - two)
    norms = float(np.linalg.norm(one) * np.linalg.norm(two))
    same = float(one @ two) / norms if norms else float(not apart.any())
    return Difference(index, float(apart.max()), float(np.sqrt(np.mean(apart**2))), same)


def compare(
    actions: Sequence[np.ndarray], references: Sequence[np.ndarray]
) -> tuple[list[Difference], dict[str, Any]]:
    """Compare two sets of answers to the same requests.

    Returns:
        Every difference, and the worst and mean of them.

    Raises:
        ValueError: There is nothing to compare, or shapes differ.
    """
    if not actions or len(actions) != len(references):
        raise ValueError(f"{len(actions)} and {len(references)} answers can not be compared")
    pairs = zip(actions, references, strict=True)
    found = [difference(index, one, two) for index, (one, two) in enumerate(pairs)]
    summary = {
        "exchanges": len(found),
        "max_abs": max(item.max_abs for item in found),
        "rmse": float(np.sqrt(np.mean([item.rmse**2 for item in found]))),
        "mean_cosine": float(np.mean([item.cosine for item in found])),
        "worst_cosine": min(item.cosine for item in found),
        "worst_exchange": max(found, key=lambda item: item.max_abs).index,
    }
    return found, summary
