"""Recorded traffic, and answering it again."""

import json

import numpy as np
import pytest

from phyai.client import PolicyClient
from phyai.serving import RecordingError, built_in_adapter, compare, read_recording, replay
from phyai.serving.jobs import Answer, EngineFailureError, Job
from phyai.serving.loading import LoadedPolicy
from phyai.serving.recording import INDEX, Recorder
from phyai.serving.runner import Runner

from .conftest import FakeEngine, request, wait_until

ACTIONS = np.arange(12, dtype=np.float32).reshape(6, 2)


def test_what_is_recorded_is_read_back(tmp_path):
    given = {
        "image": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
        "big": np.arange(3, dtype=">f8"),
        "flags": np.array([True, False]),
        "prompt": np.array("go π"),
        "names": np.array(["a", "bc"]),
        "bytes": np.array([b"\xff\xfe", b"a"]),
        "none": np.zeros((0, 2), "<U3"),
        "a": {"b": np.zeros(2)},
        "a.b": np.ones(2),
        "jpeg": b"\xff\xd8",
        "images": {"front": np.zeros((0, 2, 3), np.float32)},
        "list": [1, 2.5, None, "x", np.int32(7)],
        "map": {"array": "no mark"},
    }
    noise = np.full((6, 4), 0.5, np.float32)
    recorder = Recorder(tmp_path / "new" / "folder", 10)
    recorder.add(Job(given, num_steps=4, noise=noise), Answer(ACTIONS, prompt="go"))
    recorder.add(Job({}, seed=2**60), Answer(ACTIONS + 1))
    recorder.close()
    first, second = read_recording(tmp_path / "new" / "folder")
    assert (first.index, second.index) == (0, 1)
    assert first.job.num_steps == 4
    assert second.job.seed == 2**60
    np.testing.assert_array_equal(first.job.noise, noise)
    np.testing.assert_array_equal(first.actions, ACTIONS)
    read = first.job.request
    for key in ("image", "big", "flags", "names", "bytes", "none", "a.b"):
        np.testing.assert_array_equal(read[key], given[key])
    np.testing.assert_array_equal(read["a"]["b"], np.zeros(2))
    assert read["prompt"].shape == ()
    assert read["prompt"].item() == "go π"
    assert read["jpeg"] == b"\xff\xd8"
    assert read["images"]["front"].shape == (0, 2, 3)
    assert read["list"] == [1, 2.5, None, "x", 7]
    assert read["map"] == {"array": "no mark"}


def test_recording_goes_on_where_it_was_and_stops_at_its_limit(tmp_path):
    for number in range(3):
        recorder = Recorder(tmp_path, 2)
        recorder.add(Job({}, seed=number), Answer(ACTIONS))
        recorder.close()
    assert [exchange.job.seed for exchange in read_recording(tmp_path)] == [0, 1]


def test_what_can_not_be_written_is_left_out_and_the_rest_goes_on(tmp_path):
    recorder = Recorder(tmp_path, 100)
    for number in range(70):
        unwritable = {"x": object()} if number < 68 else {}
        recorder.add(Job(unwritable, seed=number), Answer(ACTIONS))
        wait_until(recorder._queue.empty)
    recorder.close()
    assert [exchange.job.seed for exchange in read_recording(tmp_path)] == [68, 69]


def test_damage_is_named(tmp_path):
    with pytest.raises(RecordingError, match=r"exchanges\.jsonl is missing"):
        list(read_recording(tmp_path))
    recorder = Recorder(tmp_path, 2)
    recorder.add(Job({}, seed=1), Answer(ACTIONS))
    recorder.close()
    line = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / line["file"]).write_bytes(b"\x08")
    with pytest.raises(RecordingError, match=r"exchanges\.jsonl:1 can not be read"):
        list(read_recording(tmp_path))
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(RecordingError, match=r"exchanges\.jsonl:1"):
        list(read_recording(tmp_path))


def test_a_file_name_can_not_lead_out_of_the_folder(tmp_path):
    recorder = Recorder(tmp_path / "one", 2)
    recorder.add(Job({}, seed=1), Answer(ACTIONS))
    recorder.close()
    index = tmp_path / "one" / INDEX
    line = json.loads(index.read_text())
    (tmp_path / "one" / line["file"]).rename(tmp_path / line["file"])
    index.write_text(json.dumps(line | {"file": f"../{line['file']}"}))
    with pytest.raises(RecordingError):
        list(read_recording(tmp_path / "one"))


def runner():
    engine = FakeEngine()
    return Runner(LoadedPolicy(engine, built_in_adapter("auto", engine.describe())))


def test_served_traffic_is_answered_again_exactly(serve_fake, tmp_path):
    with serve_fake(record=tmp_path) as server, PolicyClient(port=server.port) as client:
        sent = [client.infer(request(n))["actions"] for n in range(4)]
        sent.append(client.infer(request(9), rtc={"prev": np.ones((6, 2)), "delay": 6})["actions"])
    exchanges = list(read_recording(tmp_path))
    assert len({exchange.job.seed for exchange in exchanges}) == 5
    np.testing.assert_array_equal([e.actions for e in exchanges[:4]], sent[:4])
    answers = replay(exchanges, runner())
    found, summary = compare(answers, [exchange.actions for exchange in exchanges])
    assert summary["max_abs"] == 0
    assert summary["exchanges"] == len(found) == 5


def test_an_answer_that_fails_is_an_error():
    engine = runner()
    engine.engine.failure = RuntimeError("broken")
    with pytest.raises(EngineFailureError, match="broken"):
        list(replay([type("E", (), {"job": Job(request(), seed=1)})()], engine))


def test_differences_are_measured():
    one = [np.array([[1.0, 0.0]]), np.array([[0.0, 0.0]])]
    two = [np.array([[0.0, 1.0]]), np.array([[0.0, 0.0]])]
    found, summary = compare(one, two)
    assert (found[0].max_abs, found[0].rmse, found[0].cosine) == (1.0, 1.0, 0.0)
    assert found[1].cosine == 1.0
    assert summary["worst_exchange"] == 0
    assert summary["rmse"] == pytest.approx(0.5**0.5)
    with pytest.raises(ValueError, match="shape"):
        compare([np.zeros((2, 2))], [np.zeros((2, 3))])
    with pytest.raises(ValueError, match="0 and 0 answers"):
        compare([], [])
