# /// script
# requires-python = ">=3.12"
# dependencies = [
#     "accelerate==1.15.0",
#     "diffusers==0.42.1",
#     "torch==2.14.1",
#     "transformers==5.24.0",
# ]
# ///
"""Write the golden trajectories of Cosmos3's sampler with the scheduler of diffusers.

The test suite does not need diffusers; run this apart:

    uv run --isolated --no-project scripts/build_cosmos3_sampler_fixtures.py

The scheduler integrates an analytic velocity field from the same noise under several schedules.
"""
# pyright: reportMissingImports=false

from pathlib import Path

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / (
    "packages/phyai-engine/tests/models/cosmos3/fixtures/sampler.safetensors"
)
STEPS, SHIFTS = (1, 2, 4, 30), (5.0, 10.0)


def velocity(sample: torch.Tensor, timestep: int) -> torch.Tensor:
    """Returns a field that depends on place and time; the tests repeat it."""
    return 0.8 * sample - torch.sin(0.5 * sample + 0.01 * timestep)


def integrate(scheduler: UniPCMultistepScheduler, sample: torch.Tensor) -> torch.Tensor:
    """Returns the samples after each step, [steps, ...]."""
    samples = []
    for timestep in scheduler.timesteps:
        answer = velocity(sample, int(timestep))
        sample = scheduler.step(answer, timestep, sample, return_dict=False)[0]
        samples.append(sample.clone())
    return torch.stack(samples)


def main() -> None:
    """Writes noise, sigmas, timesteps and samples of every case."""
    noise = 0.5 * torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    tensors = {"noise": noise}

    def record(name: str, scheduler: UniPCMultistepScheduler) -> None:
        tensors[f"{name}.sigmas"] = scheduler.sigmas.float().clone()
        tensors[f"{name}.timesteps"] = scheduler.timesteps.long().clone()
        tensors[f"{name}.samples"] = integrate(scheduler, noise)

    common = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    for steps in STEPS:
        for shift in SHIFTS:
            scheduler = UniPCMultistepScheduler(**common, flow_shift=shift)
            line = np.linspace(0.999, 0.0, steps + 1)[:-1]
            scheduler.set_timesteps(sigmas=line)
            record(f"native.{steps}.{shift:g}", scheduler)
        scheduler = UniPCMultistepScheduler(
            **common, use_karras_sigmas=True, sigma_max=200.0, sigma_min=0.147
        )
        scheduler.set_timesteps(steps)
        record(f"karras.{steps}", scheduler)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, OUT)


if __name__ == "__main__":
    main()
