"""The text that a policy reads: cleaned task, discretised state, and the two prompt forms."""

from enum import StrEnum

import numpy as np

from phyai.processing.errors import ProcessingError

STATE_BINS = 256


class PromptForm(StrEnum):
    """What the prompt of a checkpoint looks like."""

    TASK_STATE = "task_state"
    """`Task: <task>, State: <bins>;` newline `Action: ` (π0.5 with discrete state)."""
    TASK_NEWLINE = "task_newline"
    """The task and a newline (π0, and π0.5 checkpoints that do not read the state)."""


class StateTextDims(StrEnum):
    """How many state columns the prompt spells out."""

    ROBOT = "robot"
    """The robot's own columns."""
    PADDED = "padded"
    """Zero-padded to the model's state width, as LeRobot up to 0.4.4 did."""


def check_task(index: int, task: object) -> None:
    """Raises ProcessingError unless the task of observation ``index`` is text."""
    if not isinstance(task, str):
        raise ProcessingError(
            f"observation {index}: the task is {type(task).__name__}, expected a string"
        )
    # As a command line makes them of bytes that are no text.
    surrogate = next((c for c in task if "\ud800" <= c <= "\udfff"), None)
    if surrogate is not None:
        raise ProcessingError(
            f"observation {index}: the task holds {surrogate!r}, which is no character; "
            "send text that can be written as UTF-8"
        )


def clean_task(task: str) -> str:
    """Strips the task and replaces underscores and newlines by spaces."""
    return task.strip().replace("_", " ").replace("\n", " ")


def discretize_state(state: np.ndarray) -> np.ndarray:
    """Maps normalised state values to bins.

    Args:
        state: Floats of any shape, normalised to about [-1, 1].

    Returns:
        int64 bins of the same shape: 0..255 inside [-1, 1), 255 from 1 on, -1 below -1. The edges
        are those of `linspace(-1, 1, 257)` without its last entry.
    """
    edges = np.linspace(-1.0, 1.0, STATE_BINS + 1)[:-1]
    return np.digitize(state, edges) - 1


def build_prompt(
    form: PromptForm, task: str, state: np.ndarray | None, *, clean: bool = True
) -> tuple[str, ...]:
    """Writes the prompt as pieces that are tokenised one by one and then concatenated.

    Args:
        form: Prompt form of the checkpoint.
        task: The instruction.
        state: `[dims]` normalised state; needed by `TASK_STATE` only.
        clean: Whether the task is cleaned first; LeRobot's π0 pipeline does not.

    Returns:
        The pieces; joined they are the prompt.

    Raises:
        ProcessingError: The form needs a state and there is none.
    """
    text = clean_task(task) if clean else task
    if form is PromptForm.TASK_NEWLINE:
        return (text, "\n") if clean else (text.removesuffix("\n") + "\n",)
    if state is None:
        raise ProcessingError(
            "the prompt form 'task_state' spells out the state but the observation has none; "
            "send `state`"
        )
    bins = " ".join(str(value) for value in discretize_state(state).tolist())
    return (f"Task: {text}, State: {bins};\nAction: ",)
