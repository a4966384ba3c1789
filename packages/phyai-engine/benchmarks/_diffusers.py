"""diffusers' own Cosmos3 pipeline, full size with random weights, timed on the same device."""

# pyright: reportMissingImports=false

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from phyai.models.cosmos3.bench import describe
from phyai.models.cosmos3.vae.config import LATENTS_MEAN, LATENTS_STD

TRANSFORMER: dict[str, Any] = {
    "action_gen": True,
    "action_dim": 64,
    "sound_gen": True,
    "sound_dim": 64,
}
"""What Nano has beyond diffusers' defaults."""

VAE: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [*LATENTS_MEAN],
    "latents_std": [*LATENTS_STD],
}
"""Wan 2.2's."""


class Tokens:
    """Stands for the tokenizer: as many ids as a real one makes of the policy's prompts."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, _: str) -> int:
        """Returns the id of a special token."""
        return 2

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> Any:
        """Returns 80 ids of a text and 8 of the empty one; the pipeline appends two."""
        count = 80 if str(messages[-1]["content"]).strip() else 8
        return SimpleNamespace(input_ids=[3 + index for index in range(count)])


def time_diffusers(
    device: torch.device,
    *,
    compiled: bool,
    runs: int = 3,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    tier: int = 480,
    chunk: int = 32,
) -> Iterator[tuple[str, Any]]:
    """Time the policy of diffusers' pipeline in bf16: chunk 32, 4 steps, guidance 3, no decoding.

    diffusers reads the texts and encodes all 33 frames in every request.

    Args:
        device: where to run.
        compiled: also time it with the transformer's layers compiled.
        runs: timed requests, after one that is not.
        transformer: sizes; Nano's if None.
        vae: sizes; those of Wan 2.2 if None.
        tier: of the resolution.
        chunk: actions.

    Yields:
        Name and value of what is known, ``error`` for why the rest is not.
    """
    try:
        from importlib.metadata import version

        yield "version", version("diffusers")
        pipeline = _pipeline(device, transformer or TRANSFORMER, vae or VAE)
        call = _request(pipeline, device, tier, chunk)
        yield "eager", _times(pipeline, call, device, runs)
        if compiled:
            _compile(pipeline.transformer)
            yield "compiled", _times(pipeline, call, device, runs)
    except Exception as error:  # an optional package in any state
        yield "error", describe(error)


def _pipeline(device: torch.device, transformer: dict[str, Any], vae: dict[str, Any]) -> Any:
    import diffusers

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):  # drawing fifteen billion numbers on the host takes minutes
            model = diffusers.Cosmos3OmniTransformer(**transformer)
            autoencoder = diffusers.AutoencoderKLWan(**vae)
    finally:
        torch.set_default_dtype(before)
    pipeline = diffusers.Cosmos3OmniPipeline(
        transformer=model.eval(),
        text_tokenizer=Tokens(),
        vae=autoencoder.eval(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        enable_safety_checker=False,
        default_use_system_prompt=False,
        use_native_flow_schedule=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _request(pipeline: Any, device: torch.device, tier: int, chunk: int) -> Callable[[], Any]:
    import numpy as np
    from diffusers import CosmosActionCondition
    from PIL import Image

    picture = np.random.default_rng(0).integers(0, 256, (540, 640, 3), np.uint8)
    action = CosmosActionCondition(
        mode="policy",
        chunk_size=chunk,
        domain_name="droid_lerobot",
        resolution_tier=tier,
        image=Image.fromarray(picture),
    )

    def call() -> Any:
        return pipeline(
            prompt="put the red cup on the plate",
            fps=15.0,
            action=action,
            num_inference_steps=4,
            guidance_scale=3.0,
            generator=torch.Generator(device).manual_seed(0),
            output_type="latent",
        )

    return call


def _compile(transformer: Any) -> None:
    with contextlib.suppress(ImportError):
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 64
    if getattr(transformer, "_repeated_blocks", None):
        transformer.compile_repeated_blocks()
    else:
        transformer.compile()


@torch.no_grad()
def _times(
    pipeline: Any, call: Callable[[], Any], device: torch.device, runs: int
) -> dict[str, float]:
    """Times requests, and the part of each that the transformer takes."""
    inside: list[float] = []
    forward = pipeline.transformer.forward
    starts: list[float] = []

    def before(*_: Any) -> None:
        _synchronize(device)
        starts.append(time.perf_counter())

    def after(*_: Any) -> None:
        _synchronize(device)
        inside.append(1e3 * (time.perf_counter() - starts.pop()))

    def request() -> float:
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    first = request()
    spent = sorted(request() for _ in range(runs))
    hooks = (
        pipeline.transformer.register_forward_pre_hook(before),
        pipeline.transformer.register_forward_hook(after),
    )
    request()
    for hook in hooks:
        hook.remove()
    assert pipeline.transformer.forward == forward
    return {
        "first_ms": round(first, 1),
        "p50_ms": round(statistics.median(spent), 2),
        "least_ms": round(spent[0], 2),
        "most_ms": round(spent[-1], 2),
        "transformer_ms": round(sum(inside), 2),
        "forwards": len(inside),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
