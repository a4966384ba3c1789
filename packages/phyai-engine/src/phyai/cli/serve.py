"""``phyai serve``: a policy server for robots."""

import importlib.util
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import engines, options
from phyai.cli.errors import CliError, user_error_types
from phyai.cli.option_groups import with_groups
from phyai.cli.output import print_json, print_line, print_pairs, status_line, stdout_to_stderr

if TYPE_CHECKING:
    from collections.abc import Callable

    from phyai.serving.config import ServeConfig
    from phyai.serving.launch import Pool

API_KEY_VARIABLE = "PHYAI_API_KEY"
_NEEDED = ("msgpack", "prometheus_client", "websockets")

ConfigFile = Annotated[
    Path | None, typer.Argument(help="Server configuration (YAML).", metavar="[CONFIG]")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model family: pi05, cosmos3_policy or an installed one. Default: found by the files "
        "of the checkpoint.",
        metavar="NAME",
        show_default=False,
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        help="auto, generic, libero, droid, aloha, cosmos3_droid or a YAML file. Default: auto.",
        metavar="NAME|FILE",
        show_default=False,
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        help="Address to listen on. Default: 127.0.0.1, this machine only.",
        metavar="ADDRESS",
        show_default=False,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        help="Port; 0 takes a free one. Default: 8000.", min=0, max=65_535, show_default=False
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the key that clients must send. Also: the variable PHYAI_API_KEY.",
        metavar="FILE",
        show_default=False,
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        help="Instruction of requests that have none.", metavar="TEXT", show_default=False
    ),
]
MaxBatch = Annotated[
    int | None,
    typer.Option(help="Requests computed together. Default: 8.", min=1, show_default=False),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        help="Processes that compute, one GPU each; 0, the default, computes in this process.",
        min=0,
        show_default=False,
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        help="Write requests and replies to this folder.", metavar="DIR", show_default=False
    ),
]
Video = Annotated[
    bool,
    typer.Option(
        "--video",
        help="Cosmos3: also load what decodes predicted frames, so that requests may ask for them.",
    ),
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Load the policy, answer one made-up request, and exit."),
]


@dataclass(frozen=True)
class Served:
    """Which policy answers, for robots of which kind."""

    checkpoint: options.OptionalCheckpoint = None
    adapter: AdapterOption = None
    default_prompt: Prompt = None
    device: options.Device = None
    preset: options.Preset = None


@dataclass(frozen=True)
class Listener:
    """Where a server listens, to whom, and what it does with what comes."""

    host: Host = None
    port: Port = None
    api_key_file: ApiKeyFile = None
    max_batch: MaxBatch = None
    record: Record = None

    def settings(self) -> dict[str, Any]:
        """Return what goes into `ServerConfig` as it is."""
        return {name: value for name, value in vars(self).items() if name != "api_key_file"}


def require_serving() -> None:
    """Fail with the command to install when a library of the server is missing.

    Raises:
        CliError: One is missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(f"serving needs {', '.join(missing)}", 'pip install "phyai-engine[serve]"')


@with_groups
def serve_command(
    config: ConfigFile = None,
    model: Model = None,
    *,
    served: Served,
    listener: Listener,
    replicas: Replicas = None,
    stats: options.Stats = None,
    tokenizer: options.Tokenizer = None,
    allow_identity_norm: options.AllowIdentityNorm = False,
    kernel_config: options.KernelConfigFile = None,
    video: Video = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
    check: Check = False,
    json_output: options.Json = False,
) -> None:
    """Serve a policy over openpi's WebSocket protocol until SIGTERM.

    Options win over the configuration file. SIGHUP reads the file again and changes the policy of
    the replicas without a pause.

    Example: phyai serve --model pi05 --checkpoint pi05_libero --adapter libero
    """
    require_serving()
    typed = {
        **asdict(served),
        "plugin": model,
        "stats": stats,
        "tokenizer": tokenizer,
        "allow_identity_norm": allow_identity_norm or None,
        "kernel_policy": kernel_config,
        "video": video or None,
    }
    ranks = {"cfg": cfg_parallel, "tp": tensor_parallel}
    server = {**listener.settings(), "replicas": replicas}

    def settle() -> "ServeConfig":
        settled = settle_config(config, typed, server, listener.api_key_file)
        given = {name: value for name, value in ranks.items() if value is not None}
        parallel = replace(settled.policy.parallel, **given)
        return replace(settled, policy=replace(settled.policy, parallel=parallel))

    settled = settle()
    if check:
        _check(settled, json_output)
        return
    run_server(settled, settle)


def run_server(
    config: "ServeConfig", settle: "Callable[[], ServeConfig]", pool: "Pool | None" = None
) -> None:
    """Serve until SIGTERM, with the log on standard error.

    Args:
        config: What to serve.
        settle: Returns the configuration as it is at that time, for SIGHUP.
        pool: Engines on other machines; None computes on this one.

    Raises:
        CliError: The policy, its adapter or the address can not be used as they are described.
    """
    import asyncio

    from phyai.serving.launch import serve_until_told
    from phyai.serving.logs import log_as_json

    log_as_json()
    try:
        with stdout_to_stderr():
            asyncio.run(serve_until_told(config, settle, pool))
    except ValueError as error:
        if isinstance(error, user_error_types()):
            raise  # it has a report of its own
        raise CliError(f"the policy can not be served: {error}") from error


def settle_config(
    file: Path | None,
    policy: dict[str, Any],
    server: dict[str, Any],
    key_file: Path | None,
    *,
    here: bool = True,
) -> "ServeConfig":
    """Return what the file and the command line say together.

    Args:
        file: Configuration file.
        policy: Options about the policy; None where one was not given.
        server: Options about the server, likewise.
        key_file: File of the API key.
        here: Whether the engine runs on this machine, which must have the device then.

    Raises:
        CliError: A file, a folder or a device is not usable, or there is nothing to serve.
        PolicyError: The configuration file is wrong.
    """
    from phyai.serving.config import (
        PolicyConfig,
        ServeConfig,
        checked_key,
        read_config,
        read_key,
    )

    typed = {name: value for name, value in policy.items() if value is not None}
    try:
        if file is not None:
            found = read_config(file)
        elif "checkpoint" in typed:
            found = ServeConfig(PolicyConfig(typed["checkpoint"]))
        else:
            raise CliError(
                "what shall be served? neither a configuration nor a checkpoint is given",
                "phyai serve CONFIG.yaml, or phyai serve --checkpoint DIR",
            )
        key = found.server.api_key
        if said := os.environ.get(API_KEY_VARIABLE):
            key = checked_key(said, f"the variable {API_KEY_VARIABLE}")
        if key_file is not None:
            key = read_key(key_file)
    except ValueError as error:
        raise CliError(str(error)) from None
    changes = {name: value for name, value in server.items() if value is not None}
    chosen = replace(found.policy, **typed)
    if not chosen.checkpoint.is_dir():
        raise CliError(
            f"checkpoint {chosen.checkpoint} is not a folder",
            "give the folder that holds config.json and the .safetensors files, or the parts of "
            "a Cosmos3 repository",
        )
    if here:
        engines.resolve_device(chosen.device)
    return ServeConfig(chosen, replace(found.server, **changes, api_key=key))


def _check(config: "ServeConfig", json_output: bool) -> None:
    from phyai.serving.jobs import EngineFailureError, RequestError
    from phyai.serving.loading import load_policy
    from phyai.serving.runner import Runner

    try:
        with stdout_to_stderr(), status_line(f"Loading {config.policy.checkpoint}"):
            runner = Runner(load_policy(config.policy))
            seconds = runner.warm_up()
            actions = runner.run_one(runner.example()).actions
    except (ValueError, RequestError, EngineFailureError) as error:
        raise CliError(f"the policy can not be served: {error}") from None
    metadata = runner.metadata()
    if json_output:
        print_json({"metadata": metadata, "first_answer_s": seconds, "shape": actions.shape})
        return
    print_pairs([(name, value) for name, value in metadata.items()])
    print_line()
    print_line(f"ready: actions {list(actions.shape)}, first answer after {seconds:.2f} s")
