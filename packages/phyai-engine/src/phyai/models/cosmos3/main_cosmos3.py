"""The engine's entries to Cosmos3: arguments, checkpoint, pipeline; a generator and a policy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from phyai.dispatch import CallSite
from phyai.engine import ActionChunk
from phyai.engine_config import ParallelConfig, RuntimeConfig
from phyai.layers import Linear
from phyai.models import inventory
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.loading import load_transformer
from phyai.models.cosmos3.observations import (
    CAMERAS,
    COMPOSED,
    chunk_of,
    policy_request,
    state_width,
)
from phyai.models.cosmos3.parallel import Parallel, join
from phyai.models.cosmos3.pipeline import Cosmos3Pipeline
from phyai.models.cosmos3.prompts import PromptStyle
from phyai.models.cosmos3.repository import SOUND, Repository
from phyai.models.cosmos3.requests import (
    InverseDynamicsRequest,
    PolicyRequest,
    Request,
    WorldActionRequest,
)
from phyai.models.cosmos3.results import PolicyResult, Result
from phyai.models.cosmos3.runtime import Cosmos3Runtime, FrameEncoder
from phyai.models.cosmos3.sound import load_sound_decoder
from phyai.models.cosmos3.text import Cosmos3Tokenizer
from phyai.models.cosmos3.vae import TileConfig, load_vae
from phyai.processing.errors import ProcessingError
from phyai.processing.inputs import Observation
from phyai.quantization import resolve_quant_plan
from phyai_quant import use_quant_plan

_VIEW = (360, 640)


@dataclass(frozen=True)
class Cosmos3Args:
    """How to load a Cosmos3 repository.

    Attributes:
        checkpoint_dir: folder in the layout of diffusers.
        decoder: whether to load the VAE's decoder, without which no frames are returned; None:
            yes for a generator, no for a policy.
        sound: whether to load the sound decoder if the repository has one.
        tiling: decode frames in overlapping tiles; None: whole.
        contract: how `PolicyRequest` is read; None: what the repository says.
        style: whose habits texts follow.
        system_prompt: whether a system message precedes the prompt, as diffusers has it for Nano.
        num_steps: model evaluations of observations that `infer` answers; None: the contract's.
    """

    checkpoint_dir: Path
    decoder: bool | None = None
    sound: bool = True
    tiling: TileConfig | None = None
    contract: PolicyContract | None = None
    style: PromptStyle = PromptStyle.NATIVE
    system_prompt: bool = False
    num_steps: int | None = None


class Cosmos3Generator:
    """A loaded repository that answers every request of `phyai.models.cosmos3.requests`."""

    family: ClassVar[str] = "cosmos3"
    decodes: ClassVar[bool] = True

    def __init__(
        self,
        args: Cosmos3Args,
        *,
        device: torch.device,
        params_dtype: torch.dtype,
        runtime: RuntimeConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.args = args
        self.device = device
        self.runtime: RuntimeConfig = RuntimeConfig() if runtime is None else runtime
        folder = Path(args.checkpoint_dir)
        self.repository: Repository = Repository.read(folder)
        self.contract: PolicyContract = args.contract or self.repository.contract
        # Alone, a model has no part in a process group that its process may be in.
        place = Parallel()
        if parallel is not None and parallel.ranks > 1:
            place = join(tp_size=parallel.tp, cfg_size=parallel.cfg)
        with use_quant_plan(resolve_quant_plan(folder / "transformer")):
            transformer = load_transformer(
                folder, device=device, params_dtype=params_dtype, parallel=place
            )
        self.decoder: bool = self.decodes if args.decoder is None else args.decoder
        vae = load_vae(
            folder / "vae",
            parts=("encoder", "decoder") if self.decoder else ("encoder",),
            dtype=params_dtype,
            device=device,
            tiling=args.tiling,
        )
        sound = None
        if args.sound and self.decoder and self.repository.sound:
            sound = load_sound_decoder(folder / SOUND, device=device)
        loop = Cosmos3Runtime(transformer, graphs=self.runtime.cuda_graphs)
        self.pipeline: Cosmos3Pipeline = Cosmos3Pipeline(
            transformer,
            vae,
            Cosmos3Tokenizer.from_folder(folder / "text_tokenizer"),
            sound,
            device=device,
            contract=self.contract,
            style=args.style,
            system_prompt=args.system_prompt,
            run_denoise=loop,
            encode_frame=FrameEncoder(vae.encode_frame, records=loop.records),
        )
        self.modules: dict[str, nn.Module] = {"transformer": transformer, "vae": vae}
        if sound is not None:
            self.modules["sound"] = sound

    def run(self, request: Request, **options: Any) -> Result:
        """Answers a request; options are those of `Cosmos3Pipeline.run`.

        Raises:
            ProcessingError: for a request that does not fit, or frames without a decoder.
        """
        if self.decoder or not needs_decoder(request):
            return self.pipeline.run(request, **options)
        raise ProcessingError(
            "the request asks for frames, but the VAE's decoder is not loaded; load the "
            "checkpoint with Cosmos3Args(decoder=True), or serve it with --video"
        )

    def call_sites(self) -> list[CallSite]:
        """Returns the kernel call sites of the models, in module order."""
        return inventory.call_sites(*self.modules.values())

    def linear_layers(self) -> list[Linear]:
        """Returns the layers whose weights have formats, in module order."""
        return inventory.linear_layers(*self.modules.values())

    def weight_bytes(self) -> int:
        """Returns the bytes of all parameters, of packed ones as they are stored."""
        return sum(self._bytes().values())

    def _bytes(self) -> dict[str, int]:
        return {name: inventory.weight_bytes(model) for name, model in self.modules.items()}

    def describe(self) -> dict[str, Any]:
        """Returns sizes, formats, parts, and what a policy reads and answers."""
        repository, contract = self.repository, self.contract
        formats = Counter(layer.spec.spec_id for layer in self.linear_layers())
        config = asdict(repository.config)
        width = state_width(contract)
        return {
            "family": self.family,
            "variant": repository.variant,
            "checkpoint": str(self.args.checkpoint_dir),
            "policy_checkpoint": repository.policy,
            "parts": sorted(self.modules),
            "decodes_video": self.decoder,
            "sound": "sound" in self.modules,
            "cameras": list(CAMERAS),
            "image_resolution": list(_VIEW),
            "state_dim": width,
            "action_dim": 8,
            "chunk_size": contract.chunk,
            "num_steps": self.args.num_steps or contract.sampling.steps,
            "fps": contract.fps,
            "parameters": sum(p.numel() for m in self.modules.values() for p in m.parameters()),
            "weight_bytes": self.weight_bytes(),
            "bytes_by_part": self._bytes(),
            "linear_formats": dict(formats),
            "batched": False,
            "sizes": config,
            "processing": {
                "preset": f"cosmos3/{contract.domain}",
                "cameras": [*CAMERAS, COMPOSED],
                "camera_aliases": {},
                "state_dim": width,
                "action_dim": 8,
                "action_space": str(contract.space),
                "tier": contract.tier,
                "sampling": asdict(contract.sampling),
            },
        }


class Cosmos3Policy(Cosmos3Generator):
    """A loaded DROID policy: answers observations, and every request as the generator does.

    Frames are decoded only if `Cosmos3Args.decoder` is set.
    """

    decodes: ClassVar[bool] = False

    def infer(
        self,
        observations: Sequence[Observation],
        *,
        noise: object = None,
        seed: int | None = None,
        num_steps: int | None = None,
        video: bool = False,
    ) -> list[ActionChunk]:
        """Answers observations one after another.

        Args:
            observations: pictures `CAMERAS` or `COMPOSED`, and as state the 7 joint positions and
                the gripper, or position and quaternion (x, y, z, w) of the hand in pose space.
            noise: must be None; a seed stands for the noise of all modalities.
            seed: of the noise; None draws a fresh one.
            num_steps: model evaluations; None: the contract's.
            video: whether to decode the predicted frames.

        Raises:
            ValueError: for noise.
            ProcessingError: for an observation that the contract does not allow.
        """
        if noise is not None:
            raise ValueError("this policy takes no noise but a seed, which stands for all of it")
        steps = num_steps or self.args.num_steps
        return [
            chunk_of(self._answer(observation, seed, steps, video)) for observation in observations
        ]

    def _answer(
        self, observation: Observation, seed: int | None, steps: int | None, video: bool
    ) -> PolicyResult:
        sampling = self.contract.sampling
        request = policy_request(
            observation,
            self.contract,
            sampling=sampling if steps is None else replace(sampling, steps=steps),
            seed=seed,
            decode_video=video,
        )
        result = self.run(request)
        assert isinstance(result, PolicyResult)
        return result


def needs_decoder(request: Request) -> bool:
    """Returns whether the answer to a request holds frames."""
    if isinstance(request, PolicyRequest | WorldActionRequest):
        return request.decode_video
    return not isinstance(request, InverseDynamicsRequest)
