import phyai.client as client
import phyai.serving as serving


def test_public_names():
    assert client.__all__ == [
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
    assert serving.__all__ == [
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
    for module in (client, serving):
        assert all(hasattr(module, name) for name in module.__all__)
