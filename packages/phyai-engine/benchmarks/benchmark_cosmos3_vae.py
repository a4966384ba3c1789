"""Time of Cosmos3's VAE, full size with random weights, beside diffusers' ``AutoencoderKLWan``.

    python packages/phyai-engine/benchmarks/benchmark_cosmos3_vae.py --output results.json

Both layouts of the convolutions over time are timed, the encoder's frame also as a CUDA graph.
Latents and pixels in bf16 must follow those in fp32 before anything is timed. Products are counted
on the meta device, so the rate is that of the work this program does. Where diffusers can be
imported, its class runs on the same weights and inputs. ``--tiny --device cpu`` runs all of it in
seconds.
"""

# pyright: reportMissingImports=false

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from _environment import environment
from _results import store
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from phyai.models.cosmos3.hashed import hashed, hashed_weight
from phyai.models.cosmos3.vae import TileConfig, WanVAE, WanVAEConfig
from phyai.models.cosmos3.vae.convs import Layout
from phyai.models.cosmos3.vae.random_weights import fill, tiny_config
from phyai.models.measuring import kernel_times, quantiles
from phyai.runtime.graphs import CapturedLoop

LAYOUTS: tuple[Layout, ...] = ("volume", "stacked")
TOLERANCE = 0.05  # relative error of bf16
DROID = (33, 544, 640)  # frames, height, width
TINY = (9, 16, 32)
TILES = TileConfig(16, 12)


class Inputs:
    """A clip and latents of it.

    Args:
        config: of the model.
        shape: frames, height and width in pixels.
        device: where they live.
    """

    def __init__(
        self, config: WanVAEConfig, shape: tuple[int, int, int], device: torch.device
    ) -> None:
        frames, height, width = shape
        cell = config.spatial
        grid = (1 + (frames - 1) // config.temporal, height // cell, width // cell)
        self.clip = hashed("clip", (3, *shape), device)
        self.latents = 2 * hashed("latents", (config.z_dim, *grid), device)


def cases(vae: WanVAE, inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
    """Return what is timed, by name."""
    clip, latents = inputs.clip, inputs.latents
    return {
        "encode 1 frame": lambda: vae.encode_frame(clip[:, 0]),
        "encode 5 frames": lambda: vae.encode(clip[:, :5]),
        "encode all frames": lambda: vae.encode(clip),
        "decode 1 frame": lambda: vae.decode(latents[:, :1]),
        "decode all frames": lambda: vae.decode(latents),
    }


def tera_operations(config: WanVAEConfig, shape: tuple[int, int, int]) -> dict[str, float]:
    """Return 1e12 floating-point operations of each case as this program computes it."""
    meta = torch.device("meta")
    vae = WanVAE(config, device=meta)
    found = {}
    for name, run in cases(vae, Inputs(config, shape, meta)).items():
        with FlopCounterMode(display=False) as counter:
            run()
        found[name] = counter.get_total_flops() / 1e12
    return found


def timed(run: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    """Return quantiles of the milliseconds of a call: device time on a GPU."""
    run()
    spent = []
    for _ in range(repeats):
        if device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            run()
            marks[1].record()
            marks[1].synchronize()
            spent.append(marks[0].elapsed_time(marks[1]))
        else:
            start = time.perf_counter()
            run()
            spent.append(1e3 * (time.perf_counter() - start))
    return quantiles(spent)


def measured(
    run: Callable[[], Any], device: torch.device, repeats: int, operations: float | None = None
) -> dict[str, Any]:
    """Return times, rate and, on a GPU, the memory that a call needs beside what is there."""
    row: dict[str, Any] = {"ms": timed(run, device, repeats)}
    if operations is not None:
        row["tera_operations"] = round(operations, 6)
        row["tera_operations_per_second"] = round(1e3 * operations / row["ms"]["p50"], 3)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        row["peak_gib"] = round(peak / 2**30, 3)
    return row


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error on the host."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def references(config: WanVAEConfig, inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    """Return latents of a frame and of 5, and pixels of 2 latent frames, in fp32 on the host."""
    vae = fill(WanVAE(config, device=device))
    return {name: run().cpu() for name, run in checks(vae, inputs).items()}


def checks(vae: WanVAE, inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
    """Return what is compared before a model is timed."""
    return {
        "encode 1 frame": lambda: vae.encode_frame(inputs.clip[:, 0]),
        "encode 5 frames": lambda: vae.encode(inputs.clip[:, :5]),
        "decode 2 latent frames": lambda: vae.decode(inputs.latents[:, :2]),
    }


def ours(
    config: WanVAEConfig,
    layout: Layout,
    inputs: Inputs,
    expected: Mapping[str, Tensor],
    work: Mapping[str, float],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return errors, times and kernels of one layout."""
    device = torch.device(arguments.device)
    vae = fill(WanVAE(config, dtype=torch.bfloat16, device=device, layout=layout))
    errors = {
        name: relative_error(run(), expected[name]) for name, run in checks(vae, inputs).items()
    }
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    if wrong:
        raise ValueError(f"{layout}: bf16 differs from fp32 by {wrong}; nothing is timed")
    found: dict[str, Any] = {"errors": errors, "rows": {}, "longest": {}}
    rows = found["rows"]
    for name, run in cases(vae, inputs).items():
        rows[name] = measured(run, device, arguments.repeats, work[name])
        if device.type == "cuda":
            found["longest"][name] = kernel_times(run)[: arguments.kernels]
        print(layout, name, rows[name], flush=True)
    if device.type == "cuda":
        frame = inputs.clip[:, 0].contiguous()
        graph = CapturedLoop(vae.encode_frame, [frame])
        name = "encode 1 frame"
        rows[f"{name}, graph"] = measured(
            lambda: graph(frame), device, 4 * arguments.repeats, work[name]
        )
        print(layout, "graph", rows[f"{name}, graph"], flush=True)
    vae.tiling = TILES
    rows["decode all frames in tiles"] = measured(
        lambda: vae.decode(inputs.latents), device, arguments.repeats
    )
    return found


def theirs(
    config: WanVAEConfig, inputs: Inputs, expected: Mapping[str, Tensor], arguments: Any
) -> dict[str, Any]:
    """Return times of diffusers' class in bf16, or why there are none."""
    try:
        import diffusers
        from diffusers import AutoencoderKLWan
    except ImportError as error:
        return {"error": f"diffusers cannot be imported: {error}"}
    device = torch.device(arguments.device)
    sizes = {
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": config.spatial,
        "scale_factor_temporal": config.temporal,
        **{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(config).items()},
    }
    with torch.device(device):
        vae = AutoencoderKLWan(**sizes).eval()
    for name, parameter in vae.named_parameters():
        parameter.data = hashed_weight(name, tuple(parameter.shape), device).bfloat16()
    mean, std = (
        torch.tensor(values, device=device).view(-1, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    clip = inputs.clip.bfloat16().unsqueeze(0)
    latents = (inputs.latents * std + mean).bfloat16().unsqueeze(0)
    runs: dict[str, Callable[[], Tensor]] = {
        "encode 1 frame": lambda: vae.encode(clip[:, :, :1]).latent_dist.mean[0],
        "encode 5 frames": lambda: vae.encode(clip[:, :, :5]).latent_dist.mean[0],
        "encode all frames": lambda: vae.encode(clip).latent_dist.mean[0],
        "decode 1 frame": lambda: vae.decode(latents[:, :, :1]).sample[0],
        "decode all frames": lambda: vae.decode(latents).sample[0],
    }
    normalised = (runs["encode 5 frames"]().float() - mean) / std
    found: dict[str, Any] = {
        "version": diffusers.__version__,
        "errors": {"encode 5 frames": relative_error(normalised, expected["encode 5 frames"])},
        "rows": {},
    }
    for name, run in runs.items():
        found["rows"][name] = measured(run, device, max(2, arguments.repeats // 2))
        print("diffusers", name, found["rows"][name], flush=True)
    return found


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line says."""
    device = torch.device(arguments.device)
    config, shape = (tiny_config(), TINY) if arguments.tiny else (WanVAEConfig(), DROID)
    inputs = Inputs(config, shape, device)
    document: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(device, arguments.commit),
        "shape": list(shape),
        "repeats": arguments.repeats,
        "layouts": {},
    }
    work = tera_operations(config, shape)
    expected = references(config, inputs, device)
    for layout in LAYOUTS:
        try:
            document["layouts"][layout] = ours(config, layout, inputs, expected, work, arguments)
        except RuntimeError as error:  # the other layout is still worth measuring
            document["layouts"][layout] = {"error": str(error)}
            print(layout, error, file=sys.stderr, flush=True)
        store(document, arguments.output)
    if arguments.diffusers:
        document["diffusers"] = theirs(config, inputs, expected, arguments)
    store(document, arguments.output)
    return document


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and measure; return 1 if a layout could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of the tests")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=12, help="listed for each case, by time")
    parser.add_argument("--no-diffusers", dest="diffusers", action="store_false")
    parser.add_argument("--commit", help="commit to record where git shows another or none")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU here; --tiny --device cpu runs everywhere")
    document = run(arguments)
    return int(any("error" in found for found in document["layouts"].values()))


if __name__ == "__main__":
    sys.exit(main())
