"""What to serve and how, from a YAML file or from options."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phyai.dispatch.policy_yaml import Document, read_document
from phyai.engine_config import PARAMS_DTYPES, ParallelConfig, RuntimeConfig
from phyai.models.families import detect_family
from phyai.serving.yaml_section import Section

DEFAULT_PORT = 8000
_TOP = ("plugin", "plugin_args", "config", "kernel_policy", "adapter", "server")
_PLUGIN_ARGS = (
    "checkpoint_dir",
    "preset",
    "stats",
    "tokenizer",
    "allow_identity_norm",
    "num_steps",
    "video",
)
_SERVER = (
    "host",
    "port",
    "api_key_file",
    "default_prompt",
    "max_batch",
    "batch_window_ms",
    "max_queue",
    "max_connections",
    "max_frame_mb",
    "request_timeout_s",
    "drain_s",
    "record",
    "record_limit",
    "dashboard",
    "replicas",
    "max_ongoing_requests",
)


@dataclass(frozen=True)
class PolicyConfig:
    """Which policy is served.

    Attributes:
        checkpoint: Folder of the checkpoint.
        plugin: Model family; None finds it by the files of the checkpoint.
        preset: Processing preset; None detects it.
        stats: Statistics that replace those of the checkpoint.
        tokenizer: Tokenizer that replaces that of the checkpoint.
        allow_identity_norm: Serve without statistics.
        num_steps: Integration steps; None takes the checkpoint's.
        device: "cpu", "cuda" or "cuda:N"; None takes the GPU when there is one.
        dtype: fp32, bf16 or fp16; None takes bf16 on a GPU and fp32 on the CPU.
        kernel_policy: Kernel policy file.
        adapter: Name of an adapter, or its YAML file.
        default_prompt: Instruction of requests that have none.
        video: Load what decodes predicted frames, so that requests may ask for them.
        parallel: Devices that compute one request together.
        runtime: CUDA graphs, what is kept of the request before, and batches in flight.
    """

    checkpoint: Path
    plugin: str | None = None
    preset: str | None = None
    stats: Path | None = None
    tokenizer: Path | None = None
    allow_identity_norm: bool = False
    num_steps: int | None = None
    device: str | None = None
    dtype: str | None = None
    kernel_policy: Path | None = None
    adapter: str = "auto"
    default_prompt: str | None = None
    video: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @property
    def family(self) -> str:
        """The model family, found by the files when it is not given."""
        return detect_family(self.checkpoint) if self.plugin is None else self.plugin


@dataclass(frozen=True)
class ServerConfig:
    """How it is served.

    Attributes:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        api_key: Key that clients must send; None asks for none.
        max_batch: Requests that are computed together.
        batch_window_ms: How long a request waits for others while other clients are connected.
        max_queue: Requests that may wait; more are refused.
        max_connections: Connections; more are refused.
        max_frame_bytes: Length of a request.
        request_timeout_s: How long a request may wait and compute.
        drain_s: How long requests in progress may still take when the server stops.
        record: Folder that requests and replies are written to.
        record_limit: Requests that are written at most.
        dashboard: Whether the page of the server is shown.
        replicas: Processes that compute; 0 computes in the server's own process.
        max_ongoing_requests: Requests that one replica holds at a time.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = field(default=None, repr=False)
    max_batch: int = 8
    batch_window_ms: float = 2.0
    max_queue: int = 64
    max_connections: int = 64
    max_frame_bytes: int = 32 * 2**20
    request_timeout_s: float = 30.0
    drain_s: float = 20.0
    record: Path | None = None
    record_limit: int = 10_000
    dashboard: bool = True
    replicas: int = 0
    max_ongoing_requests: int = 16


@dataclass(frozen=True)
class ServeConfig:
    """A policy and its server."""

    policy: PolicyConfig
    server: ServerConfig = field(default_factory=ServerConfig)


def read_config(path: str | Path) -> ServeConfig:
    """Read a server configuration; relative paths start at its folder.

    Raises:
        PolicyError: The file can not be used; the message names the line and what is allowed.
        ValueError: The key file is empty, or no header can hold its key.
        OSError: The key file can not be read.
    """
    document = read_document(path)
    top = Section(document, (), _TOP)
    return ServeConfig(_policy(document, top), _server(document, top))


def read_key(path: Path) -> str:
    """Return the API key that a file holds, without blanks around it.

    Raises:
        ValueError: The file holds nothing, or what `checked_key` refuses.
        OSError: The file can not be read.
    """
    key = path.expanduser().read_text(encoding="utf-8").strip()
    if not key:
        raise ValueError(f"{path} holds no API key")
    return checked_key(key, str(path))


def checked_key(key: str, source: str) -> str:
    """Return an API key that every client can send in a header.

    Raises:
        ValueError: It has blanks, or characters that clients encode in several ways. The message
            names `source` and not the key.
    """
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            f"the API key of {source} has blanks or characters beyond ASCII; a header can not "
            "hold it. Take letters, digits and signs such as - and _"
        )
    return key


def _policy(document: Document, top: Section) -> PolicyConfig:
    args = Section(document, ("plugin_args",), _PLUGIN_ARGS)
    adapter = top.text("adapter", "auto") or "auto"
    server = Section(document, ("server",), _SERVER) if "server" in top else None
    return PolicyConfig(
        checkpoint=args.file("checkpoint_dir")
        or args.fail("checkpoint_dir", "'checkpoint_dir' is missing"),
        plugin=top.text("plugin"),
        preset=args.text("preset"),
        stats=args.file("stats"),
        tokenizer=args.file("tokenizer"),
        allow_identity_norm=args.flag("allow_identity_norm"),
        num_steps=args.integer("num_steps", None, 1, 1000),
        kernel_policy=top.file("kernel_policy"),
        adapter=str(top.file("adapter")) if is_file(adapter) else adapter,
        default_prompt=server.text("default_prompt") if server else None,
        video=args.flag("video"),
        **_engine(document, top),
    )


def _engine(document: Document, top: Section) -> dict[str, Any]:
    """Return the fields of `PolicyConfig` that the section ``config`` holds."""
    if "config" not in top:
        return {}
    found: dict[str, Any] = {}
    config = Section(document, ("config",), ("device", "parallel", "runtime"))
    if "device" in config:
        target = Section(document, ("config", "device"), ("target", "params_dtype"))
        found["device"] = target.text("target")
        found["dtype"] = dtype = target.text("params_dtype")
        if dtype is not None and dtype not in PARAMS_DTYPES:
            target.fail("params_dtype", f"{dtype!r}; allowed: {', '.join(PARAMS_DTYPES)}")
    if "parallel" in config:
        ranks = Section(document, ("config", "parallel"), ("cfg", "tp"))
        found["parallel"] = ParallelConfig(
            ranks.integer("cfg", 1, 1, 2), ranks.integer("tp", 1, 1, 64)
        )
    if "runtime" in config:
        flags = ("cuda_graphs", "reuse_unchanged", "freeze_kernel_choices")
        runtime = Section(document, ("config", "runtime"), (*flags, "lanes"))
        base = RuntimeConfig()
        found["runtime"] = RuntimeConfig(
            lanes=runtime.integer("lanes", base.lanes, 1, 8),
            **{name: runtime.flag(name, getattr(base, name)) for name in flags},
        )
    return found


def _server(document: Document, top: Section) -> ServerConfig:
    base = ServerConfig()
    if "server" not in top:
        return base
    part = Section(document, ("server",), _SERVER)
    key_file = part.file("api_key_file")
    megabytes = part.integer("max_frame_mb", base.max_frame_bytes // 2**20, 1, 1024)
    return ServerConfig(
        host=part.text("host", base.host) or base.host,
        port=part.integer("port", base.port, 0, 65535),
        api_key=None if key_file is None else read_key(key_file),
        max_batch=part.integer("max_batch", base.max_batch, 1, 256),
        batch_window_ms=part.number("batch_window_ms", base.batch_window_ms, 0.0, 1000.0),
        max_queue=part.integer("max_queue", base.max_queue, 1, 100_000),
        max_connections=part.integer("max_connections", base.max_connections, 1, 100_000),
        max_frame_bytes=megabytes * 2**20,
        request_timeout_s=part.number("request_timeout_s", base.request_timeout_s, 0.01, 3600.0),
        drain_s=part.number("drain_s", base.drain_s, 0.0, 3600.0),
        record=part.file("record"),
        record_limit=part.integer("record_limit", base.record_limit, 1, 10**9),
        dashboard=part.flag("dashboard", base.dashboard),
        replicas=part.integer("replicas", base.replicas, 0, 64),
        max_ongoing_requests=part.integer(
            "max_ongoing_requests", base.max_ongoing_requests, 1, 10_000
        ),
    )


def is_file(adapter: str) -> bool:
    """Return whether an adapter is given by a file instead of by name."""
    return adapter.endswith((".yaml", ".yml"))
