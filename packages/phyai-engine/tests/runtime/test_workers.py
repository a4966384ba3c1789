"""Several processes answer as one, and say so when one of them fails."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phyai.runtime.workers import WorkerError, Workers


def test_ranks_answer_together_fail_together_and_end_together(monkeypatch):
    """One test, because starting processes takes seconds and the last step ends them."""
    monkeypatch.syspath_prepend(Path(__file__).parent)  # started processes get the path too
    from rank_adder import Adder, Question

    workers = Workers(2, Adder, 10.0)
    try:
        question = Question(torch.tensor([1.0, 2.0]), ("a", "b"))
        answer = workers.call("add", question, scale=2.0)
        torch.testing.assert_close(answer["sum"], torch.tensor([2 * 2 + 21.0, 2 * 4 + 21.0]))
        assert (answer["labels"], answer["rank"]) == (("a", "b"), 0)
        assert isinstance(answer["host"], np.ndarray)

        with pytest.raises(LookupError, match="no such thing") as raised:
            workers.call("refuse")
        assert "on rank 0" in raised.value.__notes__[0]
        assert workers.call("add", Question(torch.zeros(1), ()))["sum"].item() == 21.0

        with pytest.raises(WorkerError, match="rank 1 ended with exit code 7"):
            workers.call("die", 1)
        with pytest.raises(WorkerError, match="rank 1 ended"):
            workers.call("refuse")
    finally:
        workers.close()


def test_ranks_close_their_group_before_they_end(monkeypatch, tmp_path, capfd):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from rank_adder import Adder

    workers = Workers(2, Adder, 10.0)
    try:
        workers.call("note_the_end", str(tmp_path))
        capfd.readouterr()
        for connection in workers._connections:
            connection.close()
        for process in workers._processes:
            process.join()
        assert [process.exitcode for process in workers._processes] == [0, 0]
    finally:
        workers.close()
    notes = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert notes == {f"rank-{rank}": "held False, group False" for rank in range(2)}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_group_that_does_not_close_holds_no_process_up(hangs):
    code = f"""
import time
from phyai.runtime import workers

workers._LEAVE_S = 0.1 if {hangs} else 600.0
held = [object()]

def close():
    print("closes, holds", held, flush=True)
    time.sleep(600.0 if {hangs} else 0.0)

workers.dist.destroy_process_group = close
workers._leave(held)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=300, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (int(hangs), "")
    # A process that is ended may have said anything of this up to then.
    said = "closes, holds []\n"
    assert said.startswith(done.stdout) if hangs else done.stdout == said


class Idle:
    """Stands for a process that neither answers nor ends by itself."""

    killed = False

    def kill(self):
        self.killed = True


def test_a_rank_that_hangs_after_an_error_of_another_is_given_up(monkeypatch):
    monkeypatch.setattr("phyai.runtime.workers._GRACE_S", 0.05)
    pool = Workers.__new__(Workers)
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    pool._connections = [ours for ours, _ in pipes]
    pool._processes = [Idle(), Idle()]
    pipes[0][1].send(("error", MemoryError("no memory")))
    with pytest.raises(WorkerError, match="rank 1 hangs after another failed") as raised:
        pool._collect()
    assert isinstance(raised.value.__cause__, MemoryError)
    assert all(process.killed for process in pool._processes)


def test_the_error_of_the_lowest_rank_is_raised_once_all_have_answered():
    pool = Workers.__new__(Workers)
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    pool._connections = [ours for ours, _ in pipes]
    pool._processes = [Idle() for _ in pipes]
    answers = (("value", 3), ("error", ValueError("of rank 1")), ("error", ValueError("of rank 2")))
    for (_, theirs), answer in zip(pipes, answers, strict=True):
        theirs.send(answer)
    with pytest.raises(ValueError, match="of rank 1"):
        pool._collect()
    assert not any(process.killed for process in pool._processes)
