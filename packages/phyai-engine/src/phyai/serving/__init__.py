"""Serving a policy to robots over the network.

A request comes through these modules: `server` takes a frame from its WebSocket and gives it to
`service`, which decodes it, splits off its `options`, adds the rest of the session's last chunk
(`rtc`, `continuation`) and hands a `jobs.Job` to a backend. A backend is a `batching.Batcher` in
this process, or a `pool` (`ray_pool`) that sends the job to one of several processes: `process` is
the server's end of such a process, `replica` the other, `framing` what they say, and in each of
them a `Batcher` waits as well. The `Batcher` runs the jobs that came together in a `runner.Runner`,
which reads them with the `adapters`, asks the engine, `guiding` it, and answers with `jobs.Answer`.
`loading` builds engine and adapter of a `config`, `local` a warm runner and its batcher, and
`launch` all of it.
"""

from phyai.serving.adapter_file import read_adapter
from phyai.serving.adapters import ADAPTERS, Adapter, built_in_adapter
from phyai.serving.config import PolicyConfig, ServeConfig, ServerConfig, read_config
from phyai.serving.jobs import EngineFailureError, OverloadedError, RequestError
from phyai.serving.launch import running_server
from phyai.serving.pool import ReplicaPool
from phyai.serving.recording import RecordingError, read_recording
from phyai.serving.replay import compare, replay
from phyai.serving.replica import ReplicaError
from phyai.serving.server import PolicyServer

__all__ = [
    "ADAPTERS",
    "Adapter",
    "EngineFailureError",
    "OverloadedError",
    "PolicyConfig",
    "PolicyServer",
    "RecordingError",
    "ReplicaError",
    "ReplicaPool",
    "RequestError",
    "ServeConfig",
    "ServerConfig",
    "built_in_adapter",
    "compare",
    "read_adapter",
    "read_config",
    "read_recording",
    "replay",
    "running_server",
]
