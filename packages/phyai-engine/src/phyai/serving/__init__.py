"""Serving a policy to robots over the network."""

from phyai.serving.adapter_file import read_adapter
from phyai.serving.adapters import ADAPTERS, Adapter, built_in_adapter
from phyai.serving.config import PolicyConfig, ServeConfig, ServerConfig, read_config
from phyai.serving.jobs import EngineFailureError, OverloadedError, RequestError
from phyai.serving.launch import running_server
from phyai.serving.pool import ReplicaPool
from phyai.serving.process import ReplicaError
from phyai.serving.recording import RecordingError, read_recording
from phyai.serving.replay import compare, replay
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
