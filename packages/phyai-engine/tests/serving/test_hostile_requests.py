"""Requests of every wrong form: a robot is told what is wrong, and the engine did not fail.

``PHYAI_FUZZ_REQUESTS`` is their number for each adapter, and ``PHYAI_FUZZ_SEED`` draws others.
"""

import asyncio
import os
import random

import numpy as np
import pytest

from phyai.client import packb, unpackb
from phyai.client.errors import CodecError
from phyai.processing import ProcessingError
from phyai.serving import PolicyConfig, ServeConfig, ServerConfig, built_in_adapter
from phyai.serving.jobs import RequestError
from phyai.serving.launch import running_server

from .conftest import REACH, FakeEngine
from .mutations import mutate

COUNT = int(os.environ.get("PHYAI_FUZZ_REQUESTS", "400"))
SEED = int(os.environ.get("PHYAI_FUZZ_SEED", "7"))
TOLD = (RequestError, CodecError, ProcessingError)


def reach_request():
    picture = np.zeros((84, 84, 3), np.uint8)
    rtc = {"executed": 1, "delay": 1, "horizon": 4, "schedule": "exp"}
    return {
        "observation/state": np.zeros(4, np.float32),
        "images": {"base": picture, "wrist": picture},
        "prompt": "reach the red disc",
        "__options__": {"num_steps": 1, "seed": 3, "session": "arm", "rtc": rtc},
    }


def failed(index, request, error):
    error.add_note(f"request {index} of PHYAI_FUZZ_SEED={SEED}: {request!r:.2000}")
    return error


def test_a_server_answers_every_request_or_says_what_is_wrong_with_it():
    draw = random.Random(SEED)
    config = ServeConfig(PolicyConfig(REACH, device="cpu"), ServerConfig(port=0))

    async def run():
        replies = 0
        async with running_server(config) as server:
            for index in range(COUNT):
                changed = mutate(reach_request(), draw)
                try:
                    reply = await server.service.handle(packb(changed), "robot", None)
                except TOLD:
                    continue
                except Exception as error:
                    raise failed(index, changed, error) from None
                assert np.isfinite(unpackb(reply)["actions"]).all()
                replies += 1
        return replies

    assert 0.02 * COUNT < asyncio.run(run()) < 0.6 * COUNT


@pytest.mark.parametrize(("name", "state"), [("libero", 8), ("droid", 8), ("aloha", 14)])
def test_an_adapter_reads_every_request_or_says_what_is_wrong_with_it(name, state):
    draw = random.Random(SEED)
    adapter = built_in_adapter(name, FakeEngine(state_dim=state).describe())
    request = adapter.example((8, 8), state)
    read = 0
    for index in range(COUNT):
        changed = unpackb(packb(mutate(request, draw)))
        try:
            found = adapter.observation(changed)
        except TOLD:
            continue
        except Exception as error:
            raise failed(index, changed, error) from None
        assert isinstance(found.task, str)
        read += 1
    assert 0.02 * COUNT < read < 0.9 * COUNT
