"""Settings of an engine: device, kernels, run time; environment variables win over code."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from phyai.dispatch.config import ENV_FREEZE, KernelConfig, env_flag

ENV_GRAPHS = "PHYAI_CUDA_GRAPHS"
ENV_MERGE = "PHYAI_MERGE_QUANTIZATION"
ENV_TENSOR = "PHYAI_TENSOR_PARALLEL"
ENV_BRANCHES = "PHYAI_CFG_PARALLEL"
PARAMS_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def parse_dtype(name: str, *, what: str = "params_dtype") -> torch.dtype:
    """Returns the torch dtype for ``fp32``, ``bf16`` or ``fp16`` (or their long names).

    Raises:
        ValueError: for any other name, listing the allowed ones.
    """
    if name.lower() not in PARAMS_DTYPES:
        raise ValueError(f"{what} is {name!r}; allowed: {', '.join(PARAMS_DTYPES)}")
    return PARAMS_DTYPES[name.lower()]


@dataclass(frozen=True)
class DeviceConfig:
    """Where the model runs and in which dtype.

    Attributes:
        target: torch device string, such as ``cpu`` or ``cuda:0``.
        params_dtype: of weights and activations: fp32, bf16 or fp16.
    """

    target: str = "cpu"
    params_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.params_dtype not in PARAMS_DTYPES.values():
            raise ValueError(
                f"params_dtype is {self.params_dtype}; "
                "allowed: torch.float32, torch.bfloat16, torch.float16"
            )

    def resolve(self) -> torch.device:
        """Returns the device.

        Raises:
            ValueError: if torch does not know it or cannot use it here.
        """
        try:
            device = torch.device(self.target)
        except RuntimeError as error:
            raise ValueError(
                f"device target {self.target!r} is not a torch device; name one such as 'cpu', "
                "'cuda' or 'cuda:1'"
            ) from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device target is {self.target!r} but torch {torch.__version__} sees no GPU; "
                "use 'cpu', or check the driver with `phyai doctor`"
            )
        return device


@dataclass(frozen=True)
class RuntimeConfig:
    """How the engine runs.

    Attributes:
        freeze_kernel_choices: pin every call site's kernel after warm-up.
        cuda_graphs: record the model's work as CUDA graphs and replay them; without effect on
            other devices.
        reuse_unchanged: leave out images and prompts that equal those of the request before.
        lanes: requests in flight on the device.
    """

    freeze_kernel_choices: bool = False
    cuda_graphs: bool = True
    reuse_unchanged: bool = False
    lanes: int = 1

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ValueError(f"lanes is {self.lanes}; it must be at least 1")


@dataclass(frozen=True)
class QuantizationConfig:
    """How sources of quantization plans combine.

    Attributes:
        merge_checkpoint: test the rules of a policy, or of the plan around the engine, before
            those of the checkpoint's config, which then decides the remaining layers. Otherwise
            they replace it, and a checkpoint with quantized tensors that they do not name is
            refused.
    """

    merge_checkpoint: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices compute one request together.

    Attributes:
        cfg: 2 computes the two branches of classifier-free guidance at once, 1 one after another.
        tp: ranks that each hold a part of every large weight, of each branch.

    Raises:
        ValueError: for a number of ranks that no model family divides into.
    """

    cfg: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if self.cfg not in (1, 2):
            raise ValueError(f"cfg is {self.cfg}; guidance has 1 or 2 branches to divide")
        if self.tp < 1:
            raise ValueError(f"tp is {self.tp}; it must be at least 1")

    @property
    def ranks(self) -> int:
        """Number of processes, one device each."""
        return self.cfg * self.tp


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine.

    Attributes:
        device: device and dtype.
        kernel: kernel policy and profile.
        runtime: run-time behaviour.
        quantization: how sources of quantization plans combine.
        parallel: devices that compute one request together.
    """

    device: DeviceConfig = field(default_factory=DeviceConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def from_env(
        cls, base: "EngineConfig | None" = None, env: Mapping[str, str] | None = None
    ) -> "EngineConfig":
        """Returns ``base`` overridden by the environment.

        Read are ``PHYAI_DEVICE``, ``PHYAI_PARAMS_DTYPE``, ``PHYAI_FREEZE_KERNEL_CHOICES``,
        ``PHYAI_CUDA_GRAPHS``, ``PHYAI_MERGE_QUANTIZATION``, ``PHYAI_CFG_PARALLEL``,
        ``PHYAI_TENSOR_PARALLEL`` and what ``KernelConfig.with_env`` reads.

        Raises:
            ValueError: for a value that cannot be parsed, naming the variable.
        """
        base = cls() if base is None else base
        env = os.environ if env is None else env
        device, runtime = base.device, base.runtime
        if target := env.get("PHYAI_DEVICE"):
            device = replace(device, target=target)
        if name := env.get("PHYAI_PARAMS_DTYPE"):
            device = replace(device, params_dtype=parse_dtype(name, what="PHYAI_PARAMS_DTYPE"))
        freeze = env_flag(ENV_FREEZE, env, default=runtime.freeze_kernel_choices)
        graphs = env_flag(ENV_GRAPHS, env, default=runtime.cuda_graphs)
        runtime = replace(runtime, freeze_kernel_choices=freeze, cuda_graphs=graphs)
        merge = env_flag(ENV_MERGE, env, default=base.quantization.merge_checkpoint)
        parallel = ParallelConfig(
            cfg=_env_count(ENV_BRANCHES, env, base.parallel.cfg),
            tp=_env_count(ENV_TENSOR, env, base.parallel.tp),
        )
        return cls(device, base.kernel.with_env(env), runtime, QuantizationConfig(merge), parallel)


def _env_count(name: str, env: Mapping[str, str], default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; expected a number of ranks, at least 1")
    return int(text)
