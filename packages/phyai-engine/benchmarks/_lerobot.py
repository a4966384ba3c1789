"""LeRobot's own π0.5, full size with random weights, timed on the same device."""

# pyright: reportMissingImports=false

import statistics
import time
from typing import Any

import torch

VIEWS, SLOTS, STEPS = 3, 200, 10


def time_lerobot(
    device: torch.device, *, compile_mode: str | None, runs: int = 10
) -> dict[str, Any]:
    """Time `sample_actions` of LeRobot's policy in its bf16 mode, on 3 views and 200 slots.

    Args:
        device: a CUDA device.
        compile_mode: also time the policy with LeRobot's own compilation in this mode of
            `torch.compile`, which takes more than six minutes, or with its denoise step alone
            compiled if this is ``"step"``, which takes half a minute.
        runs: timed chunks, after two that are not.

    Returns:
        Version and milliseconds, or why there are none.
    """
    try:
        from importlib.metadata import version

        found: dict[str, Any] = {"version": version("lerobot")}
        found["eager"] = _times(device, compile_mode=None, runs=runs)
        if compile_mode is not None:
            found["compiled"] = _times(device, compile_mode=compile_mode, runs=runs)
    except Exception as error:  # an optional package in any state
        return {"error": f"{type(error).__name__}: {error}"}
    return found


def _policy(device: torch.device, compile_mode: str | None) -> Any:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    features = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, 224, 224))
        for name in cameras
    }
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (32,))
    config = PI05Config(
        dtype="bfloat16",
        device=str(device),
        compile_model=compile_mode not in (None, "step"),
        compile_mode=compile_mode or "default",
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (32,))},
    )
    # Drawing four billion numbers on the host takes minutes.
    with torch.device(device):
        policy = PI05Policy(config)
    policy = policy.to(device).eval()
    if compile_mode == "step":
        policy.model.denoise_step = torch.compile(policy.model.denoise_step)
    return policy


@torch.no_grad()
def _times(device: torch.device, *, compile_mode: str | None, runs: int) -> dict[str, Any]:
    policy = _policy(device, compile_mode)
    generator = torch.Generator(device).manual_seed(0)
    images = [
        torch.rand(1, 3, 224, 224, generator=generator, device=device) * 2 - 1 for _ in range(VIEWS)
    ]
    masks = [torch.ones(1, dtype=torch.bool, device=device) for _ in range(VIEWS)]
    tokens = torch.randint(1, 257152, (1, SLOTS), generator=generator, device=device)
    token_mask = torch.ones(1, SLOTS, dtype=torch.bool, device=device)
    noise = torch.randn(1, 50, 32, generator=generator, device=device)

    def chunk() -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        policy.model.sample_actions(images, masks, tokens, token_mask, noise=noise, num_steps=STEPS)
        torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    first = chunk()
    chunk()
    spent = sorted(chunk() for _ in range(runs))
    return {
        "mode": compile_mode,
        "first_ms": round(first, 1),
        "p50_ms": round(statistics.median(spent), 2),
        "least_ms": round(spent[0], 2),
        "most_ms": round(spent[-1], 2),
    }
