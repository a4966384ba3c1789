import numpy as np
import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.prompt import PromptForm, build_prompt, clean_task, discretize_state

BINS = [(-1.0, 0), (-0.5, 64), (0.0, 128), (0.5, 192), (0.99, 254), (1.0, 255), (7.5, 255)]


@pytest.mark.parametrize(("value", "expected"), [*BINS, (-1.0001, -1), (-40.0, -1)])
def test_bins(value, expected):
    assert discretize_state(np.array([value])).tolist() == [expected]


def test_bins_of_a_batch_match_a_count_of_the_edges_passed():
    state = np.random.default_rng(0).normal(size=(3, 7)) * 2
    edges = [-1 + 2 * k / 256 for k in range(256)]
    expected = [[sum(value >= edge for edge in edges) - 1 for value in row] for row in state]
    assert discretize_state(state).tolist() == expected


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("pick up", "pick up"),
        ("  stack_the\ncups ", "stack the cups"),
        ("_a__b_", " a  b "),
        ("\nreach\n", "reach"),
        ("", ""),
    ],
)
def test_clean_task(task, expected):
    assert clean_task(task) == expected


def test_task_state_spells_bins_and_keeps_the_trailing_space():
    state = np.array([-1.5, -1.0, -0.5, 0.0, 0.5, 0.99, 1.0])
    pieces = build_prompt(PromptForm.TASK_STATE, " fold_the\nshirt ", state)
    assert pieces == ("Task: fold the shirt, State: -1 0 64 128 192 254 255;\nAction: ",)


def test_task_newline_tokenises_the_newline_apart():
    assert build_prompt(PromptForm.TASK_NEWLINE, " pick_up ", None) == ("pick up", "\n")


@pytest.mark.parametrize("task", ["  stack_the\ncups ", "  stack_the\ncups \n"])
def test_task_newline_uncleaned_ends_with_one_newline(task):
    pieces = build_prompt(PromptForm.TASK_NEWLINE, task, None, clean=False)
    assert pieces == ("  stack_the\ncups \n",)


def test_task_state_without_state_is_an_error():
    with pytest.raises(ProcessingError, match=r"task_state.*send `state`"):
        build_prompt(PromptForm.TASK_STATE, "go", None)
