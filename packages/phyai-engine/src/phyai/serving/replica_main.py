"""A process that computes for a server.

It reads its configuration as one JSON line from standard input and talks over a socket that
it inherits, whose number is its argument. It ends when the server does.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phyai.engine_config import ParallelConfig, RuntimeConfig
from phyai.serving.batching import Batcher
from phyai.serving.config import PolicyConfig, ServeConfig, ServerConfig
from phyai.serving.framing import read_message, write_message
from phyai.serving.jobs import Answer, EngineFailureError, Job, RequestError
from phyai.serving.logs import event, log_as_json
from phyai.serving.runner import Runner
from phyai.serving.runner_setup import load_runner, make_batcher
from phyai.serving.service import is_bad_request

_PATHS = ("checkpoint", "stats", "tokenizer", "kernel_policy")


def config_to_json(config: ServeConfig) -> str:
    """Return what a replica needs of a configuration as one line; the API key is not in it."""
    server = {
        name: getattr(config.server, name) for name in ("max_batch", "max_queue", "batch_window_ms")
    }
    return json.dumps({"policy": asdict(config.policy), "server": server}, default=str)


def config_from_json(text: str) -> ServeConfig:
    """Return the configuration that `config_to_json` wrote."""
    document = json.loads(text)
    policy = document["policy"]
    paths = {name: Path(policy[name]) for name in _PATHS if policy[name] is not None}
    parts = {
        "parallel": ParallelConfig(**policy["parallel"]),
        "runtime": RuntimeConfig(**policy["runtime"]),
    }
    settled = PolicyConfig(**policy | paths | parts)
    return ServeConfig(settled, ServerConfig(**document["server"]))


def main(argv: list[str]) -> int:
    """Load the policy and compute until the server closes the socket."""
    # What this process starts must not keep the socket open after it.
    descriptor = int(argv[1])
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    log_as_json()
    config = config_from_json(sys.stdin.readline())
    runner, problem = None, ""
    try:
        runner = load_runner(config)
    except Exception as error:
        event("replica can not start", level=40, error=str(error))
        problem = f"{type(error).__name__}: {error}"
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_compute(channel, runner, config.server, problem))
    return 0 if runner is not None else 1


async def _compute(
    channel: socket.socket, runner: Runner | None, config: ServerConfig, problem: str
) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    if runner is None:
        write_message(writer, {"failed": problem})
        await writer.drain()
        return
    # Requests gather while the engine computes; which clients could send more, the server knows.
    batcher = make_batcher(runner, config, lambda: 0)
    write_message(writer, {"ready": runner.metadata()})
    tasks: set[asyncio.Task[None]] = set()
    while (message := await read_message(reader)) is not None:
        task = asyncio.create_task(_answer(batcher, writer, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await batcher.close()


async def _answer(
    batcher: Batcher, writer: asyncio.StreamWriter, message: Mapping[str, Any]
) -> None:
    reply = await reply_to(batcher, message) if "job" in message else {}
    write_message(writer, {"id": message["id"], **reply})
    with contextlib.suppress(ConnectionError):
        await writer.drain()


async def reply_to(batcher: Batcher, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a message's ``job``, or its error, as plain values for the codec."""
    try:
        return {"answer": (await batcher.submit(Job.from_wire(message["job"]))).to_wire()}
    except Exception as error:
        trace = error.trace if isinstance(error, EngineFailureError) else ""
        return {"error": {"bad": is_bad_request(error), "text": str(error), "trace": trace}}


def answer_of(reply: Mapping[str, Any], index: int) -> Answer:
    """Return the answer of replica `index` that `reply_to` made into values of the codec.

    Raises:
        RequestError: The job is unusable.
        EngineFailureError: The engine failed.
    """
    error = reply.get("error")
    if error is None:
        return Answer.from_wire(reply["answer"], index)
    if error["bad"]:
        raise RequestError(error["text"])
    raise EngineFailureError(error["text"], error["trace"])
