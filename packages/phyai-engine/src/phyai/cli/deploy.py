"""``phyai deploy``: a policy server whose engines run on a Ray cluster."""

import importlib.util
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from phyai.cli import serve
from phyai.cli.errors import CliError
from phyai.cli.option_groups import with_groups

if TYPE_CHECKING:
    from phyai.serving.config import ServeConfig

Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster, e.g. auto or HOST:6379. Default: Ray is started on this machine.",
        metavar="ADDRESS",
        show_default=False,
    ),
]
Gpus = Annotated[
    float | None,
    typer.Option(
        help="GPUs of one replica. Default: 1, or 0 with --device cpu.",
        min=0.0,
        show_default=False,
    ),
]
Replicas = Annotated[int, typer.Option(help="Replicas in the cluster.", min=1)]


@with_groups
def deploy_command(
    config: serve.ConfigFile = None,
    address: Address = None,
    replicas: Replicas = 1,
    gpus: Gpus = None,
    *,
    served: serve.Served,
    listener: serve.Listener,
) -> None:
    """Serve a policy with replicas on a Ray cluster until SIGTERM.

    The checkpoint must be at the same path on every machine of the cluster.

    Example: phyai deploy server.yaml --address auto --replicas 4
    """
    serve.require_serving()
    if importlib.util.find_spec("ray") is None:
        raise CliError("deploying needs Ray", 'pip install "phyai-engine[serve,ray]"')
    server = {**listener.settings(), "replicas": replicas}

    def settle() -> "ServeConfig":
        return serve.settle_config(
            config, asdict(served), server, listener.api_key_file, here=False
        )

    settled = settle()
    from phyai.serving.ray_pool import RayPool

    needed = gpus if gpus is not None else float(settled.policy.device != "cpu")
    serve.run_server(settled, settle, RayPool(settled, address, needed))
