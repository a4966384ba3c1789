"""Measure ConvRot INT8 convolutions beside those of cuDNN in float16.

    python benchmark_convrot_int8_conv3d.py [--quick] [--providers NAME ...] [--cases TEXT ...]
        [--tiles] [--budget SECONDS] [--json FILE] [--commit HASH]

Six convolutions of a video encoder, contiguous and channels last, and with the framewise group
norm and SiLU in front. Preparation of the input is part of our times; the float16 convolutions
get inputs that are padded already. Each result is compared with the float16 one first; a wrong
one is not timed. ``--tiles`` times every tile of the Hopper product instead. A GPU run of all
cases stores ``results/<device>/conv3d.json``. Without a GPU it is a dry run.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _conv3d_cases import (
    BASELINES,
    EPSILON,
    FULL,
    LABELS,
    NORM_GROUPS,
    QUICK,
    ConvolutionCase,
    make_operands,
    normalize,
    pad,
    providers,
)
from _graph_timing import Variant, time_variants
from _harness import (
    WrongResultError,
    choose_cases,
    device,
    environment,
    kernel_names,
    relative_error,
)
from _linear_tables import number
from _report import result_path, say, table, write_json
from torch import Tensor
from torch.nn import functional

from piper_kernels._triton.targets import sm_count

SCHEMA = 1
SETS = 2
MOST_ERROR = 0.025
TARGET = 1.5


def expected_of(case: ConvolutionCase, operands: Any, name: str) -> Tensor:
    """Return what a provider must be close to, in FP32 products where the device is the CPU."""
    x = operands.inputs[0]
    if name.endswith("block"):
        x = normalize(x.float(), operands.norm)
    x = pad(case, x.to(operands.dense.dtype))
    return functional.conv3d(x, operands.dense, operands.bias, case.stride)


def measure(case: ConvolutionCase, names: Sequence[str]) -> list[dict]:
    """Check and time a case; one row for each provider."""
    operands = make_operands(case, device(), SETS)
    rows, variants = [], {}
    expected = {end: expected_of(case, operands, end) for end in ("", "block")}
    for name, run in providers(case, operands).items():
        if name not in names:
            continue
        row: dict[str, Any] = {"case": case.name, "provider": name}
        rows.append(row)
        try:
            row["error"] = relative_error(run(0), expected["block" if "block" in name else ""])
            if not row["error"] < MOST_ERROR:
                raise WrongResultError(f"{LABELS[name]}: relative error {row['error']:.4f}")
            row["kernels"] = kernel_names(run, device())
        except Exception as error:  # a provider that fails must not stop the others
            row["failed"] = f"{type(error).__name__}: {error}"[:400]
            continue
        variants[name] = Variant(run, SETS)
    times = time_variants(variants)
    for row in rows:
        row.update(times.get(row["provider"], {}))
    baseline = min((times[n]["ms"] for n in BASELINES if "ms" in times.get(n, {})), default=None)
    for row in rows:
        if "ms" in row:
            row["tops"] = case.operations / row["ms"] / 1e9
            ours = "block" not in row["provider"]
            base = baseline if ours else times.get("fp16_block", {}).get("ms")
            row["times_fp16"] = base / row["ms"] if base else None
    return rows


def tile_rows(case: ConvolutionCase) -> list[dict]:
    """Time the preparations of a case, and the Hopper product with every tile."""
    from piper_kernels.conv3d.convrot.int8 import _triton_backend
    from piper_kernels.conv3d.convrot.int8._nvidia import hopper, hopper_plan
    from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization

    operands, geometry = make_operands(case, device(), 1), case.geometry
    packed, processors = operands.packed, sm_count(device())
    scale = packed.act_per_tensor_scale
    assert scale is not None  # for the type checker: filters of cases have one
    weight = Filter(packed.qdata, packed.scale, operands.bias, packed.group_size, scale)
    norm = Normalization(*operands.norm, NORM_GROUPS, EPSILON)
    source = operands.inputs[0]
    last = source.to(memory_format=torch.channels_last_3d)
    inputs = {
        "preparation, contiguous": (source, None),
        "preparation, channels last": (last, None),
        "preparation with norm and SiLU": (source, norm),
    }
    variants = {}
    for name, (x, applied) in inputs.items():
        prepare = (x, weight, geometry, applied, processors)
        variants[name] = Variant(lambda _, a=prepare: _triton_backend.prepare_voxels(*a), 1)
    codes = _triton_backend.prepare_voxels(source, weight, geometry, None, processors)
    chosen = hopper_plan.select_plan(
        case.outputs, case.channels, geometry.out_height, geometry.out_width,
        geometry.out_frames, processors,
    )  # fmt: skip
    depth = min(hopper_plan.MAX_DEPTH, case.channels)
    for shape in hopper_plan.TILES:
        plan = hopper_plan.HopperPlan(
            shape.outputs, shape.voxels // 32, 32, depth, shape.stages, shape.num_warps,
            shape.programs_per_sm, shape.buffers,
        )  # fmt: skip
        mark = " (chosen)" if plan == chosen else ""
        name = f"{plan.outputs}x{plan.voxels}, {plan.programs_per_sm} a processor{mark}"
        arguments = (codes, weight, geometry, None, plan, processors)
        variants[name] = Variant(lambda _, a=arguments: hopper.convolve(*a), 1)
    times = time_variants(variants)
    for name, found in times.items():
        found |= {"case": case.name, "provider": name}
        if "ms" in found:
            found["tops"] = case.operations / found["ms"] / 1e9
    return list(times.values())


def conv3d_table(rows: list[dict]) -> str:
    """Return the table of one case: a line for each provider."""
    header = ["provider", "ms", "p10–p90", "TOP/s", "× float16", "relative error"]
    lines = []
    for row in rows:
        label = LABELS.get(row["provider"], row["provider"])
        if "ms" not in row:
            lines.append([label, row.get("failed", "not measured"), *[None] * 4])
            continue
        spread = f"{number(row['p10'])}–{number(row['p90'])}"
        numbers = [number(row.get(name)) for name in ("tops", "times_fp16")]
        error = row.get("error")
        error = f"{error:.4f}" if isinstance(error, float) else None
        lines.append([label, number(row["ms"]), spread, *numbers, error])
    return table(header, lines)


def targets_of(rows: list[dict]) -> list[dict]:
    """Return for each case whether our convolution of a contiguous input reaches the target."""
    ratios = dict.fromkeys(row["case"] for row in rows)
    ratios |= {r["case"]: r.get("times_fp16") for r in rows if r["provider"] == "piper"}
    return [
        {
            "case": name,
            "times_fp16": value,
            "target": TARGET,
            "met": None if value is None else value >= TARGET,
        }
        for name, value in ratios.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and store; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, a dry run")
    parser.add_argument("--providers", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="cases whose names contain it")
    parser.add_argument("--tiles", action="store_true", help="tiles of the Hopper product")
    parser.add_argument("--budget", type=float, default=50, help="seconds (default 50)")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    options = parser.parse_args(arguments)
    quick = options.quick or device().type != "cuda"
    if options.tiles and device().type != "cuda":
        parser.error("--tiles needs a Hopper GPU")
    cases = choose_cases(QUICK if quick else FULL, options.cases)
    facts = environment(quick=quick, revision=options.commit)
    say("\n".join(f"{name}: {value}" for name, value in facts.items()))
    path = options.json
    whole = not quick and not options.cases and len(options.providers) == len(LABELS)
    if path is None and whole and not options.tiles:
        path = result_path(facts, "conv3d")
    torch.backends.cudnn.benchmark = True
    start, rows, late = time.perf_counter(), [], [case.name for case in cases]
    for case in cases:
        if time.perf_counter() - start > options.budget:
            break
        with torch.inference_mode():
            found = tile_rows(case) if options.tiles else measure(case, options.providers)
        rows += found
        late.remove(case.name)
        if path is not None:
            result = {"schema": SCHEMA} | facts | {"rows": rows, "targets": targets_of(rows)}
            write_json(path, json.loads(json.dumps(result | {"not_started": late})))
        say(f"\n{case.name}\n{conv3d_table(found)}")
        if device().type == "cuda":
            torch.cuda.empty_cache()
    failed = [f"{r['case']} {r['provider']}: {r['failed']}" for r in rows if "failed" in r]
    failed += [f"{name}: not started, the budget was over" for name in late]
    for line in failed:
        say(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
