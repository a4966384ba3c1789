"""The shipped policy in closed loop on this machine: bf16 beside ConvRot INT8.

As a script: ``python examples/pi05/reach/demo.py``; writes ``demo/rollout.png``.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

from phyai.cli.output import quiet_libraries
from phyai.dispatch.config import KernelConfig
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05.main_pi05 import PI05Args, PI05Policy
from reach.evaluate import EngineRollout, EvalResult, evaluate
from reach.rollout import draw_rollout, record

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoint"
INT8_POLICY = HERE.parent / "kernel_policies" / "convrot_int8.yaml"
PICTURE_SEED = 7
TABLE_WIDTH = 120
"""Columns the kernel table needs; a narrower terminal wraps it."""


@dataclass(frozen=True)
class Run:
    """One way of running the policy and what it gave."""

    name: str
    engine: Engine
    result: EvalResult
    disk_bytes: int


def build_engine(policy: Path | None) -> Engine:
    """Returns the reach policy in bf16 on the CPU, under a kernel policy file if given."""
    return Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(checkpoint_dir=CHECKPOINT),
            config=EngineConfig(
                device=DeviceConfig(target="cpu", params_dtype=torch.bfloat16),
                kernel=KernelConfig(config_path=policy),
            ),
        )
    )


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor as it is stored: a quantized weight as its packed parts."""
    for name, tensor in model.state_dict().items():
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            yield name, tensor
        else:
            for part in flatten()[0]:
                yield f"{name}.{part}", getattr(tensor, part)


def write_weights(engine: Engine, path: Path) -> int:
    """Writes the engine's weights in their formats and returns the size of the file."""
    model = cast("PI05Policy", engine.plugin).model
    tensors = {name: tensor.contiguous() for name, tensor in stored_tensors(model)}
    save_file(tensors, path)
    return path.stat().st_size


def run(name: str, policy: Path | None, episodes: int, out: Path, console: Console) -> Run:
    """Loads the policy, drives it through the episodes and writes its weights."""
    engine = build_engine(policy)
    rollout = EngineRollout(engine)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=episodes)
        parts = []
        for seed in range(episodes):
            parts.append(evaluate(rollout, episodes=1, seed=seed))
            progress.advance(task)
    return Run(
        name, engine, merge(parts), write_weights(engine, out / f"weights-{name}.safetensors")
    )


def merge(parts: list[EvalResult]) -> EvalResult:
    """Joins evaluations of one episode each."""
    won = [part for part in parts if part.success_rate]
    times = sorted(part.ms_per_chunk for part in parts)
    return EvalResult(
        success_rate=len(won) / len(parts),
        steps=sum(part.steps for part in won) / max(len(won), 1),
        ms_per_chunk=times[len(times) // 2],
        episodes=tuple(part.episodes[0] for part in parts),
    )


def result_table(runs: list[Run]) -> Table:
    """Returns success, sizes and speed of each run."""
    table = Table(title="π0.5 reach policy on this CPU")
    for column in ("weights", "success", "steps", "on disk", "in memory", "ms per chunk"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for one in runs:
        episodes = len(one.result.episodes)
        table.add_row(
            one.name,
            f"{one.result.success_rate:.0%} of {episodes}",
            f"{one.result.steps:.1f}",
            f"{one.disk_bytes / 1e6:.1f} MB",
            f"{one.engine.weight_bytes() / 1e6:.1f} MB",
            f"{one.result.ms_per_chunk:.1f}",
        )
    return table


def kernel_table(runs: list[Run]) -> Table:
    """Returns which kernel each kind of call site chose."""
    chosen: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    for one in runs:
        for trace in one.engine.explain():
            row = chosen.setdefault((trace.op, trace.role), {})
            row.setdefault(one.name, Counter())[str(trace.selected)] += 1
    table = Table(title="chosen kernels")
    for column in ("operation", "role", "sites", *(one.name for one in runs)):
        table.add_column(column, justify="right" if column == "sites" else "left")
    for (op, role), row in sorted(chosen.items()):
        sites = max(sum(kernels.values()) for kernels in row.values())
        table.add_row(op, role, str(sites), *("\n".join(row.get(one.name, {})) for one in runs))
    return table


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="The reach policy in bf16 and in ConvRot INT8")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    quiet = Console(stderr=True)
    runs = [
        run("bf16", None, args.episodes, args.out, quiet),
        run("convrot-int8", INT8_POLICY, args.episodes, args.out, quiet),
    ]
    console.print(result_table(runs))
    console.print(kernel_table(runs))
    example = runs[-1].engine.describe()
    console.print(f"weight formats under {INT8_POLICY.name}: {example['linear_formats']}")
    picture = args.out / "rollout.png"
    rollout = record(EngineRollout(runs[-1].engine), seed=PICTURE_SEED)
    draw_rollout(picture, rollout)
    console.print(f"wrote {picture}: “{rollout.task}” with INT8 weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
