"""``phyai bench cosmos3``: latency of the DROID contract against the arithmetic of its floor."""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import engines, options
from phyai.cli.errors import CliError
from phyai.cli.output import (
    make_table,
    print_json,
    print_line,
    print_table,
    status_line,
    stdout_to_stderr,
)

if TYPE_CHECKING:
    from phyai.models.cosmos3.config import Cosmos3Config
    from phyai.models.cosmos3.droid import PolicyContract


class Size(enum.StrEnum):
    """Published sizes."""

    NANO = "nano"
    EDGE = "edge"
    SUPER = "super"


Sizes = Annotated[Size, typer.Option(help="Size of the model.")]
Requests = Annotated[int, typer.Option(help="Timed requests.", min=1)]
Kernels = Annotated[int, typer.Option(help="List this many kernels of a request by time.", min=0)]
Tiny = Annotated[
    bool,
    typer.Option("--tiny", help="Time a tiny model, also on the CPU: to see what is printed."),
]
Floor = Annotated[
    bool,
    typer.Option("--floor", help="Print the floor of a request alone; needs no GPU."),
]


def bench_cosmos3(
    size: Sizes = Size.NANO,
    device: options.Device = None,
    kernel_config: options.KernelConfigFile = None,
    requests: Requests = 8,
    kernels: Kernels = 0,
    tiny: Tiny = False,
    floor: Floor = False,
    json_output: options.Json = False,
) -> None:
    """Time the DROID policy of random weights: 33 frames, 32 actions, 4 steps, guidance 3.

    The instruction was read before, as in an episode. The floor of a stage is its operations over
    what an H200 reaches: 788 TFLOP/s in bf16; 1400 for products of 8 bits, with attention at 650.

    Example: phyai bench cosmos3 --kernel-config
    examples/cosmos3/kernel_policies/cosmos3_h200_fp8.yaml
    """
    config, contract = _published(size)
    if floor:
        _print_floor(config, contract, size, json_output)
        return
    target = engines.resolve_device(device)
    if not tiny and not target.startswith("cuda"):
        raise CliError(
            f"this benchmark times a GPU and the device is {target}",
            "--floor prints the arithmetic alone, --tiny times a tiny model here",
        )
    with stdout_to_stderr(), status_line("Building and timing"):
        result = _measure(config, contract, target, kernel_config, requests, kernels, tiny=tiny)
    result.pop("actions")
    result |= {"size": "tiny" if tiny else str(size), "device": target, "policy": kernel_config}
    if json_output:
        print_json(result)
        return
    show(result)


def _published(size: Size) -> "tuple[Cosmos3Config, PolicyContract]":
    from phyai.models.cosmos3.config import Cosmos3Config
    from phyai.models.cosmos3.droid import PolicyContract

    edge = size is Size.EDGE
    sizes = {Size.NANO: Cosmos3Config.nano, Size.EDGE: Cosmos3Config.edge}
    contract = PolicyContract.edge() if edge else PolicyContract.nano()
    return sizes.get(size, Cosmos3Config.super_)(), contract


def _measure(
    config: "Cosmos3Config",
    contract: "PolicyContract",
    device: str,
    policy: Path | None,
    requests: int,
    kernels: int,
    *,
    tiny: bool,
) -> dict[str, Any]:
    from dataclasses import replace

    import torch

    from phyai.models.cosmos3.bench import measure_policy
    from phyai.models.cosmos3.config import Cosmos3Config
    from phyai.models.cosmos3.vae.config import WanVAEConfig
    from phyai.models.cosmos3.vae.random_weights import tiny_config

    vae = WanVAEConfig()
    if tiny:
        vae = tiny_config()
        channels = {"latent_channel": vae.z_dim, "patch_latent_dim": 4 * vae.z_dim}
        variant = "qwen" if config.gated else "edge"
        config = Cosmos3Config.tiny(variant, num_embodiment_domains=9, **channels)
        contract = replace(contract, chunk=4, tier="256")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return measure_policy(
        config,
        vae,
        policy,
        device=device,
        dtype=dtype,
        contract=contract,
        requests=requests,
        listed=kernels,
    )


def floors(config: "Cosmos3Config", contract: "PolicyContract") -> dict[str, dict[str, float]]:
    """Return the floors of a request in bf16 and in 8 bits, by stage, in milliseconds."""
    from phyai.models.cosmos3.bench import TEXT_TOKENS
    from phyai.models.cosmos3.bench_parallel import DROID_LAYOUT
    from phyai.models.cosmos3.floor import H200_8BIT, H200_BF16, floor_ms

    return {
        name: floor_ms(
            config, DROID_LAYOUT, contract.sampling, TEXT_TOKENS, canvas=(544, 736), rates=rates
        )
        for name, rates in (("bf16", H200_BF16), ("8 bits", H200_8BIT))
    }


def _print_floor(
    config: "Cosmos3Config", contract: "PolicyContract", size: Size, json_output: bool
) -> None:
    found = floors(config, contract)
    if json_output:
        print_json({"size": str(size), "floor_ms": found})
        return
    table = make_table("stage", *found, numbers=True)
    for stage in found["bf16"]:
        table.add_row(stage, *(f"{rates[stage]:.1f}" for rates in found.values()))
    print_table(table)
    print_line(f"milliseconds of one DROID request of {size} on an H200, text read before")


def show(result: Mapping[str, Any]) -> None:
    """Print one row for each stage, and the longest kernels where they were listed."""
    table = make_table("stage", "p50", "p99", "floor", "ratio", numbers=True)
    floor, ratio = result["floor_ms"], result["ratio"]
    for stage, spent in result["ms"].items():
        table.add_row(
            stage,
            f"{spent['p50']:.2f}",
            f"{spent['p99']:.2f}",
            f"{floor[stage]:.2f}" if floor.get(stage) else "-",
            f"{ratio[stage]:.2f}" if stage in ratio else "-",
        )
    print_table(table)
    print_line(
        f"milliseconds of one DROID request of {result['size']} on {result['device']}, "
        f"{result['tokens']} media tokens; request is from host to host"
    )
    if result["weight_bytes"]:
        print_line(
            f"{result['weight_bytes'] / 1e9:.1f} GB after loading, "
            f"{result['most_bytes'] / 1e9:.1f} GB at most, built in {result['built_s']:.1f} s"
        )
    for name, count, spent in result.get("longest", ()):
        print_line(f"  {spent:9.1f} us {count:5d} x  {name[:100]}")
