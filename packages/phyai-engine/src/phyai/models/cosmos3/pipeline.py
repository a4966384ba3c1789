"""Cosmos3 from request to answer: plan, encode, read, denoise, decode."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from phyai.models.cosmos3.canvas import to_uint8
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.denoise import VelocityModel, denoise
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.noise import NoiseSource, start
from phyai.models.cosmos3.plan_actions import plan_embodiment, plan_policy
from phyai.models.cosmos3.plan_generation import plan_image, plan_video
from phyai.models.cosmos3.plans import Plan, Setup
from phyai.models.cosmos3.prompt_cache import PromptCache
from phyai.models.cosmos3.prompts import PromptStyle
from phyai.models.cosmos3.requests import (
    ForwardDynamicsRequest,
    ImageToVideoRequest,
    InverseDynamicsRequest,
    PolicyRequest,
    Request,
    TextToImageRequest,
    TextToVideoRequest,
    VideoToVideoRequest,
    WorldActionRequest,
)
from phyai.models.cosmos3.results import (
    SAMPLE_RATE,
    ImageResult,
    PolicyResult,
    Result,
    VideoResult,
)
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.sound import SoundDecoder
from phyai.models.cosmos3.state import Conditions, Layout, Modalities
from phyai.models.cosmos3.stopwatch import Stopwatch
from phyai.models.cosmos3.text import Cosmos3Tokenizer
from phyai.models.cosmos3.vae import WanVAE
from phyai.processing.errors import ProcessingError

GENERATION_SEED = 0
"""Of requests other than `PolicyRequest` that bring no seed."""

_PLANNERS: dict[type, Callable[..., Plan]] = {
    PolicyRequest: plan_policy,
    WorldActionRequest: plan_embodiment,
    ForwardDynamicsRequest: plan_embodiment,
    InverseDynamicsRequest: plan_embodiment,
    TextToImageRequest: plan_image,
    TextToVideoRequest: plan_video,
    ImageToVideoRequest: plan_video,
    VideoToVideoRequest: plan_video,
}


class Transformer(VelocityModel, Protocol):
    """What the pipeline needs of the transformer."""

    config: Cosmos3Config
    domains: tuple[int, ...]

    def prefill(self, token_ids: Tensor) -> Conditions:
        """Returns keys and values of token ids, int64 [S]."""
        ...


Denoise = Callable[[VelocityModel, Modalities, Sequence[Conditions], Layout, Sampling], Modalities]
"""`denoise` or another runner of the same loop, such as one that replays CUDA graphs."""


class Cosmos3Pipeline:
    """Answers requests, one at a time.

    Args:
        transformer: both towers.
        vae: of pixels and video latents.
        tokenizer: of the checkpoint.
        sound_decoder: of sound latents, or None.
        device: where the model lives.
        contract: how `PolicyRequest` is answered.
        style: whose habits texts follow; those of the model owner by default.
        system_prompt: put a system message before prompts, as diffusers does for Nano.
        prompt_tokens: most text tokens whose keys and values are kept for later requests.
        longest_prompt: most tokens of one text, its template included.
        seed: of the stream of seeds for policy requests without one.
        run_denoise: what integrates the flow.
        encode_frame: what encodes one picture [3, H, W]; ``vae.encode_frame`` if None.
    """

    def __init__(
        self,
        transformer: Transformer,
        vae: WanVAE,
        tokenizer: Cosmos3Tokenizer,
        sound_decoder: SoundDecoder | None = None,
        *,
        device: torch.device,
        contract: PolicyContract | None = None,
        style: PromptStyle = PromptStyle.NATIVE,
        system_prompt: bool = False,
        prompt_tokens: int = 2048,
        longest_prompt: int = 8192,
        seed: int = 0,
        run_denoise: Denoise = denoise,
        encode_frame: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        config = transformer.config
        if tokenizer.vocab_size > config.vocab_size:
            raise ProcessingError(
                f"{tokenizer.source} has {tokenizer.vocab_size} ids but the model embeds "
                f"{config.vocab_size}; use the tokenizer of the checkpoint"
            )
        self.transformer = transformer
        self.vae = vae
        self.tokenizer = tokenizer
        self.sound_decoder = sound_decoder
        self.device = device
        self.prompts: PromptCache = PromptCache(transformer.prefill, device, prompt_tokens)
        self.setup: Setup = Setup(
            device=device,
            action_dim=config.action_dim,
            domains=tuple(transformer.domains),
            sound=sound_decoder.sound_frames if sound_decoder and config.sound_gen else None,
            contract=PolicyContract.nano() if contract is None else contract,
            style=style,
            system_prompt=system_prompt,
        )
        widths = (config.action_dim, config.sound_dim)
        self._longest = longest_prompt
        self._noise = NoiseSource(config.latent_channel, widths, device)
        # Where the host only queues work, it draws the next request's noise meanwhile.
        self._works_ahead = device.type == "cuda"
        self._seeds = np.random.default_rng(seed)
        self._next_seed = self._draw_seed()
        self._denoise = run_denoise
        self._encode_frame = vae.encode_frame if encode_frame is None else encode_frame

    @torch.no_grad()
    def run(self, request: Request, *, noise: Modalities | None = None) -> Result:
        """Answers a request.

        Args:
            request: of any mode.
            noise: starting point of every modality, instead of drawing one.

        Raises:
            ProcessingError: for a request that the model or the contract does not allow.
        """
        watch = Stopwatch(self.device)
        plan = self.plan(request)
        watch.mark("preprocess")
        frames = None if plan.pixels is None else self._encode(plan)
        watch.mark("encode")
        conditions = self.conditions(plan)
        watch.mark("prefill")
        seed = self._seed(request)
        # Noise is drawn on the host while the device encodes and reads.
        if noise is None:
            noise = self._noise.get(request.noise, seed, plan.layout)
        else:
            noise = self._noise.checked(noise, plan.layout)
        state = start(noise, plan.layout, frames=frames, rows=plan.rows)
        watch.mark("noise")
        state = self._denoise(self.transformer, state, conditions, plan.layout, plan.sampling)
        watch.mark("denoise")
        if isinstance(request, PolicyRequest) and request.seed is None and self._works_ahead:
            self._noise.prepare(request.noise, self._next_seed, plan.layout)
        pixels = self._decode(state.video) if plan.video else None
        sound = self._decode_sound(state.sound)
        watch.mark("decode")
        rows = self._answered_rows(plan, state)
        actions = None if rows is None or plan.actions is None else plan.actions(rows)
        watch.mark("postprocess")
        latents = state.video.clone() if request.return_latents else None
        common = (watch.milliseconds(), plan.prompt, seed, latents)
        if rows is not None and actions is not None:
            return PolicyResult(*common, actions, rows, pixels, plan.fps)
        assert pixels is not None, "a plan without actions has a video"
        if isinstance(request, TextToImageRequest):
            return ImageResult(*common, pixels[0])
        rate = (
            SAMPLE_RATE if self.sound_decoder is None else self.sound_decoder.config.sampling_rate
        )
        return VideoResult(*common, pixels, plan.fps, sound, rate)

    def plan(self, request: Request) -> Plan:
        """Returns what a request means for the model, without running it.

        Raises:
            ProcessingError: for a request that the model or the contract does not allow.
        """
        planner = _PLANNERS.get(type(request))
        if planner is None:
            allowed = ", ".join(kind.__name__ for kind in _PLANNERS)
            raise ProcessingError(f"request is {type(request).__name__}; allowed: {allowed}")
        plan = planner(request, self.setup)
        if plan.video and self.vae.decoder is None:
            raise ProcessingError(
                "the request asks for frames, but the VAE was loaded without its decoder; load it "
                'with parts=("encoder", "decoder") or leave frames out'
            )
        return plan

    def conditions(self, plan: Plan) -> list[Conditions]:
        """Returns keys and values of the conditional text, and of the other if it is needed.

        The empty unconditional text is computed once in the life of the pipeline.

        Raises:
            ProcessingError: for a text that is too long.
        """
        found = [self.prompts.get(self._ids("prompt", plan.prompt, plan.system))]
        if plan.sampling.branches == 2:
            ids = self._ids("negative_prompt", plan.negative, plan.system)
            found.append(self.prompts.get(ids) if plan.negative else self.prompts.pin(ids))
        return found

    def _ids(self, name: str, text: str, system: str | None) -> tuple[int, ...]:
        ids = self.tokenizer.encode(text, system=system)
        if len(ids) > self._longest:
            raise ProcessingError(
                f"{name} has {len(ids)} tokens with its template; allowed: {self._longest}. "
                "Shorten it, or raise longest_prompt of the pipeline"
            )
        return ids

    def _encode(self, plan: Plan) -> Tensor:
        """Returns the latents [C, clean frames, h, w] of a plan's pixels, without padding."""
        assert plan.pixels is not None
        assert plan.cells is not None
        if plan.pixels.shape[1] == 1:
            latents = self._encode_frame(plan.pixels[:, 0])[:, None]
        else:
            latents = self.vae.encode(plan.pixels)
        return latents[:, :, : plan.cells[0], : plan.cells[1]]

    def _decode(self, latents: Tensor) -> np.ndarray:
        return np.concatenate([to_uint8(part) for part in self.vae.decode_stream(latents)])

    def _decode_sound(self, latents: Tensor | None) -> np.ndarray | None:
        if latents is None or self.sound_decoder is None:
            return None
        return self.sound_decoder.decode(latents).float().cpu().numpy()

    def _answered_rows(self, plan: Plan, state: Modalities) -> np.ndarray | None:
        if plan.layout.action is None or state.action is None or plan.actions is None:
            return None
        given = len(plan.layout.action.clean_rows)
        return state.action[given:, : plan.layout.action.raw_dim].float().cpu().numpy()

    def _seed(self, request: Request) -> int:
        if request.seed is not None:
            return request.seed
        if not isinstance(request, PolicyRequest):
            return GENERATION_SEED
        seed, self._next_seed = self._next_seed, self._draw_seed()
        return seed

    def _draw_seed(self) -> int:
        return int(self._seeds.integers(0, 2**31))
