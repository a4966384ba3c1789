"""The engine: one model, its processors, its kernels, ready to answer observations."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.dispatch.api import freeze_kernel_choices
from phyai.dispatch.bootstrap import initialize_kernel_system, kernel_selector_scope
from phyai.dispatch.selector import Selector
from phyai.dispatch.trace import SelectionTrace
from phyai.dispatch.types import ModelContext
from phyai.engine_config import EngineConfig
from phyai.engine_plugins import find_plugin
from phyai.engine_ranks import RankedPlugin, in_rank
from phyai.processing.inputs import Observation
from phyai.quantization import quant_sources


@dataclass(frozen=True)
class EngineArgs:
    """What to run and how.

    Attributes:
        plugin: model family, such as ``pi05``.
        plugin_args: that family's arguments, such as ``PI05Args``.
        config: device, kernels and run time.
    """

    plugin: str
    plugin_args: Any
    config: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class ActionChunk:
    """The answer to one observation.

    Attributes:
        actions: fp32 [chunk, action_dim] in the robot's units.
        normalized: fp32 [chunk, max_action_dim] as the model produced them.
        timing_ms: milliseconds by stage; of the whole batch when there was one.
        prompt: the text the model read.
        video: uint8 [T, H, W, 3] predicted frames, of a family that predicts them, if asked for.
    """

    actions: np.ndarray
    normalized: np.ndarray
    timing_ms: Mapping[str, float]
    prompt: str
    video: np.ndarray | None = None


class Engine:
    """Loads a model and answers observations.

    The environment overrides ``args.config`` (see ``EngineConfig.from_env``). A kernel policy's
    quantization section decides weight formats while the model is built; without one, the plan
    around the constructor, and without that, the checkpoint's own quantization config. With
    ``config.quantization.merge_checkpoint`` the rules of the first two are tested before those of
    the checkpoint instead of replacing them.

    Args:
        args: what to run and how.

    Raises:
        ValueError: for an unknown plugin, device or setting.
        PolicyError: for a kernel policy that cannot be used.
        CheckpointError: for weights that do not fit.
        QuantConfigError: for formats that cannot be built here.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        self.config: EngineConfig = EngineConfig.from_env(args.config)
        device = self.config.device.resolve()
        factory = find_plugin(args.plugin)
        family = getattr(factory, "family", args.plugin)
        self.selector: Selector = initialize_kernel_system(
            self.config.kernel, device=device, model=ModelContext(family=family)
        )
        self._frozen = False
        several = self.config.parallel.ranks > 1
        if several and "parallel" not in inspect.signature(factory).parameters:
            raise ValueError(
                f"the model family {args.plugin!r} runs on one device; parallel is "
                f"{self.config.parallel}, leave it out"
            )
        if several and not in_rank():
            self.plugin: Any = RankedPlugin(args, self.config)
            return
        more = {"parallel": self.config.parallel} if several else {}
        with (
            kernel_selector_scope(self.selector),
            quant_sources(
                self.selector.policy.quant_plan,
                merge_checkpoint=self.config.quantization.merge_checkpoint,
            ),
        ):
            self.plugin = factory(
                args.plugin_args,
                device=device,
                params_dtype=self.config.device.params_dtype,
                runtime=self.config.runtime,
                **more,
            )

    def run(self, request: Any, **options: Any) -> Any:
        """Answers a request of a family that has its own, such as those of Cosmos3.

        Args:
            request: one of the family's requests, such as
                ``phyai.models.cosmos3.requests.TextToVideoRequest``.
            options: of the family.

        Raises:
            ValueError: for a family that answers observations only, or a request that does not fit
                the checkpoint.
            ProcessingError: for pictures, states or texts that cannot be used.
        """
        if not hasattr(self.plugin, "run"):
            raise ValueError(
                f"the model family {self.args.plugin!r} has no requests of its own; "
                "use infer with an Observation"
            )
        with kernel_selector_scope(self.selector):
            result = self.plugin.run(request, **options)
            self._freeze_once()
        return result

    def warm_up(self, batches: Sequence[int] = (1,)) -> None:
        """Records what a GPU runtime would record when it first sees a length of text.

        Families without such a runtime, and other devices, have nothing to record.

        Args:
            batches: numbers of observations that will be answered at once.
        """
        record = getattr(self.plugin, "warm_up", None)
        if record is not None:
            with kernel_selector_scope(self.selector):
                record(batches)

    def infer(
        self,
        observation: Observation,
        *,
        noise: Tensor | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        guidance: Any = None,
        video: bool = False,
    ) -> ActionChunk:
        """Answers one observation; ``noise`` is [1, chunk, max_action_dim]."""
        return self.infer_batch(
            [observation],
            noise=noise,
            seed=seed,
            num_steps=num_steps,
            guidance=guidance,
            video=video,
        )[0]

    def infer_batch(
        self,
        observations: Sequence[Observation],
        *,
        noise: Tensor | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        guidance: Any = None,
        video: bool = False,
    ) -> list[ActionChunk]:
        """Answers several observations at once.

        Args:
            observations: at least one.
            noise: starting point [B, chunk, max_action_dim], instead of ``seed``.
            seed: of the drawn starting point.
            num_steps: integration steps, the checkpoint's number by default.
            guidance: what the new chunks shall continue, for model families that know it, such as
                ``phyai.guidance.Guidance``.
            video: whether to return the frames that a family predicts with its actions.

        Raises:
            ValueError: for an empty batch, bad noise, or guidance or video for a family without.
            ProcessingError: for an observation the processors cannot use.
        """
        if not observations:
            raise ValueError("the batch has no observation")
        if not hasattr(self.plugin, "infer"):
            raise ValueError(
                f"the model family {self.args.plugin!r} answers no observations; use run with a "
                "request of the family"
            )
        if guidance is not None:
            self._check_guides()
        more = {} if guidance is None else {"guidance": guidance}
        if video:
            self._check_video()
            more["video"] = True
        with kernel_selector_scope(self.selector):
            chunks = self.plugin.infer(
                observations, noise=noise, seed=seed, num_steps=num_steps, **more
            )
            self._freeze_once()
        return chunks

    def _freeze_once(self) -> None:
        if self.config.runtime.freeze_kernel_choices and not self._frozen:
            freeze_kernel_choices()
            self._frozen = True

    def close(self) -> None:
        """Ends the processes of an engine on several devices; the engine answers no more."""
        if isinstance(self.plugin, RankedPlugin):
            self.plugin.close()

    @property
    def guides(self) -> bool:
        """Whether the model family takes ``guidance``."""
        return hasattr(self.plugin, "normalize_actions") and (
            "guidance" in inspect.signature(self.plugin.infer).parameters
        )

    def normalize_actions(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        """Returns actions as the model would have made them, the way back of its answers.

        Args:
            actions: [T, action_dim] in the robot's units.
            observation: what relative actions are relative to.

        Returns:
            fp32 [T, max_action_dim]; columns that the robot does not have are zero.

        Raises:
            ValueError: for a family without guidance.
            ProcessingError: for actions of another width, or a missing state.
        """
        self._check_guides()
        plugin: Any = self.plugin
        return plugin.normalize_actions(actions, observation)

    def _check_guides(self) -> None:
        if not self.guides:
            raise ValueError(
                f"the model family {self.args.plugin!r} takes no guidance; "
                "join the finished chunks instead"
            )

    def _check_video(self) -> None:
        if "video" not in inspect.signature(self.plugin.infer).parameters:
            raise ValueError(f"the model family {self.args.plugin!r} predicts no video")

    def explain(self) -> list[SelectionTrace]:
        """Returns, for every call site used so far, what was chosen and why; of rank 0."""
        if isinstance(self.plugin, RankedPlugin):
            return self.plugin.explain()
        with kernel_selector_scope(self.selector):
            traces = [site.trace() for site in self.plugin.call_sites()]
        return [trace for trace in traces if trace is not None]

    def weight_bytes(self) -> int:
        """Returns the bytes that the model's weights occupy, on one device of several."""
        return self.plugin.weight_bytes()

    def describe(self) -> dict[str, Any]:
        """Returns what is running: model, processors, formats, device, policy."""
        policy = self.selector.policy
        return {
            "plugin": self.args.plugin,
            "device": self.config.device.target,
            "params_dtype": str(self.config.device.params_dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "policy": {"source": policy.source, "version": policy.version},
            "guidance": self.guides,
            "ranks": self.config.parallel.ranks,
            **self.plugin.describe(),
        }
