"""Talking to a policy server from a robot: NumPy, msgpack and websockets, and nothing else."""

from phyai.client.actions import ActionInterpolator, ActionQueue, LatencyTracker
from phyai.client.codec import Dialect, packb, unpackb
from phyai.client.errors import CodecError, ServerError
from phyai.client.policy import PolicyClient
from phyai.client.realtime import RealtimePolicy
from phyai.client.scan import Limits

__all__ = [
    "ActionInterpolator",
    "ActionQueue",
    "CodecError",
    "Dialect",
    "LatencyTracker",
    "Limits",
    "PolicyClient",
    "RealtimePolicy",
    "ServerError",
    "packb",
    "unpackb",
]
