"""Latency of Cosmos3 Nano, full size with random weights, against its floor and diffusers.

    python packages/phyai-engine/benchmarks/benchmark_cosmos3.py --policy FILE --output results.json
    python packages/phyai-engine/benchmarks/benchmark_cosmos3.py --video --output results.json
    python packages/phyai-engine/benchmarks/benchmark_cosmos3.py --parallel --output results.json
    python packages/phyai-engine/benchmarks/benchmark_cosmos3.py --page results.json --merge FILE

The first command times the DROID contract (33 frames, 32 actions, 4 steps, guidance 3, text read
before) under every ``--policy``, compares the actions with those of the first one, and with
``--diffusers`` times diffusers' own pipeline in the same run. ``--video`` times one forward of
720p, 189 frames, with each kernel of attention; ``--parallel`` needs two GPUs, which share
guidance branches or every layer. Parts are merged into an existing output. The last command writes
``docs/cosmos3-performance.md`` from the stored file; ``--merge`` adds parts that were stored in
other files to it before.
"""

import argparse
import gc
import json
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _cosmos3_page import page
from _diffusers import time_diffusers
from _environment import environment
from _results import store

from phyai.models.cosmos3.bench import DROID_DOMAIN, cosines, describe, kernels, measure_policy
from phyai.models.cosmos3.bench_parallel import DROID_LAYOUT, time_ranks
from phyai.models.cosmos3.bench_video import (
    ATTENTION,
    VIDEO_720P,
    attention_rules,
    time_video_step,
)
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import Layout
from phyai.models.cosmos3.vae.config import WanVAEConfig
from phyai.models.cosmos3.vae.random_weights import tiny_config

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "cosmos3-performance.md"
PARTS = ("policies", "diffusers", "video", "parallel")


class Run:
    """One run of the benchmark, whose results are stored as they come.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.tiny = arguments.tiny
        self.device = torch.device("cpu" if self.tiny else "cuda")
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        self.config, self.vae, self.video = Cosmos3Config.nano(), WanVAEConfig(), VIDEO_720P
        self.contract = PolicyContract.nano()
        if self.tiny:
            latent: dict[str, Any] = {"latent_channel": 6, "patch_latent_dim": 24}
            self.config = Cosmos3Config.tiny(
                num_hidden_layers=2, num_embodiment_domains=9, **latent
            )
            self.vae, self.video = tiny_config(), Layout(2, 6, 6, fps=24.0)
            self.contract = PolicyContract(chunk=4, tier="256", sampling=Sampling(2, 3.0, 5.0))
        self.document: dict[str, Any] = {}
        output = arguments.output
        if output is not None and output.exists():
            self.document = json.loads(output.read_text(encoding="utf-8"))
        self.document["date"] = datetime.now(UTC).date().isoformat()
        self.document["environment"] = environment(self.device, arguments.commit)

    def store(self) -> None:
        """Write what is known so far."""
        store(self.document, self.arguments.output)

    def policies(self) -> None:
        """Measure the DROID contract under every policy; what one cannot do is its error."""
        arguments = self.arguments
        found = self.document.setdefault("policies", {})
        reference: np.ndarray | None = None
        cases = [(policy, True) for policy in [*arguments.policy] or [None]]
        cases += [(policy, False) for policy in arguments.one_stream]
        for policy, overlaps in cases:
            name = "default" if policy is None else policy.stem
            name += "" if overlaps else " on one stream"
            found[name] = entry = self._policy(policy, overlaps)
            actions = entry.pop("actions", None)
            if actions is not None and reference is None:
                reference = actions
            elif actions is not None and reference is not None:
                entry["actions_to_first"] = cosines(actions, reference)
            print(name, json.dumps({k: entry[k] for k in entry if k != "longest"}), flush=True)
            self.store()
            _free()

    def _policy(self, policy: Path | None, overlaps: bool) -> dict[str, Any]:
        try:
            return measure_policy(
                self.config,
                self.vae,
                policy,
                device=str(self.device),
                dtype=self.dtype,
                contract=self.contract,
                requests=self.arguments.requests,
                listed=self.arguments.kernels,
                overlaps=overlaps,
            )
        except Exception as error:  # the other policies are still worth measuring
            traceback.print_exc()
            return {"error": describe(error)}

    def diffusers(self) -> None:
        """Time diffusers' own pipeline."""
        sizes: dict[str, Any] = {}
        if self.tiny:
            sizes = {"tier": 256, "chunk": 4, **_tiny_diffusers()}
        found = self.document["diffusers"] = {"beside": _requests(self.document)}
        parts = time_diffusers(self.device, compiled=self.arguments.compile, **sizes)
        for name, value in parts:
            print("diffusers", name, value, flush=True)
            found[name] = value
            self.store()
        _free()

    def long_video(self) -> None:
        """Time one step of a long video: each kernel of attention, then every other policy."""
        policies: list[Path] = self.arguments.policy
        tokens = self.video.tokens(self.config.latent_patch_size)
        found = self.document["video"] = {"tokens": tokens, "rows": {}}
        model = self._video_model(policies[0] if policies else None)
        reference = None
        for name, (row, params) in ATTENTION.items():
            rules = attention_rules(row, params)
            entry, video = time_video_step(model, self.video, rules, reference, runs=1)
            reference = video if reference is None else reference
            self._add(found["rows"], name, entry)
        for policy in policies[1:]:
            del model
            _free()
            model = self._video_model(policy)
            entry, _ = time_video_step(model, self.video, policy, reference, runs=1)
            self._add(found["rows"], f"`{policy.stem}`", entry)
        del model
        _free()

    def _video_model(self, policy: Path | None) -> Cosmos3Transformer:
        with kernels(policy, str(self.device)):
            return random_transformer(
                self.config, params_dtype=self.dtype, device=self.device, domains=[DROID_DOMAIN]
            )

    def _add(self, rows: dict[str, Any], name: str, entry: dict[str, Any]) -> None:
        print("video", name, entry, flush=True)
        rows[name] = entry
        self.store()

    def two_devices(self) -> None:
        """Time two devices that share guidance branches, or every layer."""
        layout = Layout(2, 4, 4, fps=15.0) if self.tiny else DROID_LAYOUT
        found = self.document.setdefault("parallel", {})
        for policy in [*self.arguments.policy] or [None]:
            name = "default" if policy is None else policy.stem
            found[name] = time_ranks(
                self.config,
                layout,
                self.contract.sampling,
                dtype=self.dtype,
                kind=self.device.type,
                policy=policy,
            )
            print("parallel", name, found[name], flush=True)
            self.store()


def _tiny_diffusers() -> dict[str, Any]:
    from _diffusers import VAE

    transformer = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 128,
        "latent_channel": 4, "latent_patch_size": 2, "patch_latent_dim": 16, "action_gen": True,
        "action_dim": 12, "num_embodiment_domains": 9, "rope_axes_dim": [4, 2, 2],
    }  # fmt: skip
    latent = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return {
        "transformer": transformer,
        "vae": {**VAE, "base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1, **latent},
        "runs": 1,
    }


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _requests(document: dict[str, Any]) -> dict[str, float]:
    """Return the median request of every policy that was measured."""
    policies = document.get("policies", {}).items()
    return {name: entry["ms"]["request"]["p50"] for name, entry in policies if "ms" in entry}


def write_page(results: Path, others: Sequence[Path]) -> None:
    """Write the page from results, after adding parts to them that other runs have stored.

    A part that the results have stays as it is; the page says where an added one comes from.

    Raises:
        ValueError: A file has results of another device.
    """
    document = json.loads(results.read_text(encoding="utf-8"))
    for other in others:
        more = json.loads(other.read_text(encoding="utf-8"))
        devices = [part["environment"]["device"] for part in (document, more)]
        if devices[0] != devices[1]:
            raise ValueError(f"{other} has results of {devices[1]}, {results} of {devices[0]}")
        for part in [part for part in PARTS if part in more and part not in document]:
            document[part] = more[part]
            origin = {"date": more["date"], "commit": more["environment"]["commit"]}
            origin = more.get("origins", {}).get(part, origin)
            document.setdefault("origins", {})[part] = origin
            if part == "diffusers":
                document[part].setdefault("beside", _requests(more))
    if others:
        store(document, results)
    PAGE.write_text(page(document), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, then measure or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, action="append", default=[])
    parser.add_argument(
        "--one-stream",
        type=Path,
        action="append",
        default=[],
        metavar="POLICY",
        help="also with the attention of branches one after the other",
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--kernels", type=int, default=12, help="listed, by their time")
    parser.add_argument("--no-policies", action="store_true", help="skip the DROID contract")
    parser.add_argument("--diffusers", action="store_true")
    parser.add_argument("--compile", action="store_true", help="also diffusers' compiled layers")
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--commit", help="commit to record where git shows another or none")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", type=Path, help="stored results to write the page from")
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        help="further results, added to those of the page first",
    )
    arguments = parser.parse_args(argv)
    if arguments.page is not None:
        write_page(arguments.page, arguments.merge)
        return
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("this benchmark needs an NVIDIA GPU; --tiny rehearses it on the CPU")
    run = Run(arguments)
    if not (arguments.no_policies or arguments.video or arguments.parallel):
        run.policies()
    if arguments.diffusers:
        run.diffusers()
    if arguments.video:
        run.long_video()
    if arguments.parallel:
        run.two_devices()


if __name__ == "__main__":
    main()
