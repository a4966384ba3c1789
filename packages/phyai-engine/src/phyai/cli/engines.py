"""The one place where commands build an engine."""

import contextlib
import enum
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phyai.cli.errors import CliError, user_error_types
from phyai.cli.output import status_line, stdout_to_stderr

if TYPE_CHECKING:
    from phyai.engine import Engine
    from phyai.engine_config import EngineConfig
    from phyai.processing import Observation

POLICY_VARIABLE = "PHYAI_KERNEL_CONFIG"
PROFILE_VARIABLE = "PHYAI_KERNEL_PROFILE"
GRAPHS_VARIABLE = "PHYAI_CUDA_GRAPHS"
CACHE_VARIABLE = "PHYAI_KERNEL_AUTOTUNE_CACHE"
DEVICE_VARIABLE = "PHYAI_DEVICE"
DTYPE_VARIABLE = "PHYAI_PARAMS_DTYPE"
BRANCHES_VARIABLE = "PHYAI_CFG_PARALLEL"
TENSOR_VARIABLE = "PHYAI_TENSOR_PARALLEL"


class Precision(enum.StrEnum):
    """Element type of weights and activations that no policy quantizes."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@dataclass(frozen=True)
class EngineRequest:
    """What the command line says about the engine to build.

    What is given here wins over ``PHYAI_DEVICE``, ``PHYAI_PARAMS_DTYPE`` and
    ``PHYAI_KERNEL_CONFIG``.

    Attributes:
        checkpoint: Folder of the checkpoint.
        device: "cpu", "cuda" or "cuda:N"; None takes the GPU when there is one.
        dtype: None takes bf16 on a GPU and fp32 on the CPU.
        kernel_config: Kernel policy file.
        preset: Processing preset; None detects it from the checkpoint.
        stats: Normalisation statistics that replace those of the checkpoint.
        tokenizer: Tokenizer file that replaces that of the checkpoint.
        allow_identity_norm: Run without statistics.
        savings: False computes what the exact savings would skip.
        autotune_cache: File of measured times; given, kernels are measured and the fastest used.
        graphs: False launches every kernel anew instead of replaying CUDA graphs.
        decoder: Cosmos3: whether to load what makes frames and sound of latents.
        tiles: Cosmos3: decode frames in overlapping tiles, which need less memory.
        cfg_parallel: Devices that divide the branches of guidance; None takes the environment's.
        tensor_parallel: Devices that divide the large weights of a branch, likewise.
    """

    checkpoint: Path
    device: str | None = None
    dtype: Precision | None = None
    kernel_config: Path | None = None
    preset: str | None = None
    stats: Path | None = None
    tokenizer: Path | None = None
    allow_identity_norm: bool = False
    savings: bool = True
    autotune_cache: Path | None = None
    graphs: bool = True
    decoder: bool = False
    tiles: bool = False
    cfg_parallel: int | None = None
    tensor_parallel: int | None = None


def resolve_device(device: str | None) -> str:
    """Return the device to use and check that this machine has it.

    Args:
        device: "cpu", "cuda", "cuda:N" or None.

    Raises:
        CliError: The device does not exist here.
    """
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return device
    if kind != "cuda" or (index and not index.isdigit()):
        raise CliError(f"unknown device {device!r}", "use cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise CliError(f"device {device} is not usable: {no_gpu_reason()}", "use --device cpu")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise CliError(f"device {device} does not exist", f"this machine has cuda:0..{count - 1}")
    return device


def no_gpu_reason() -> str:
    """Return why PyTorch sees no GPU on this machine."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA and ROCm"
    return f"torch {torch.__version__} finds no GPU or no driver on this machine"


@contextlib.contextmanager
def flags_win(typed: Mapping[str, object]) -> Iterator[None]:
    """Hide environment variables while an explicit flag is in force.

    Variables override what code and servers configure; a flag typed by the user is nearer.

    Args:
        typed: Variable name to the value of its flag; None where the flag was not given.
    """
    hidden = [name for name, value in typed.items() if value is not None and name in os.environ]
    saved = {name: os.environ.pop(name) for name in hidden}
    try:
        yield
    finally:
        os.environ.update(saved)


def build_engine(request: EngineRequest) -> "Engine":
    """Load the checkpoint and return an engine ready for ``infer``.

    Args:
        request: Options of the command line.

    Raises:
        CliError: The folder or the device does not exist.
        CheckpointError, ProcessingError, PolicyError, QuantConfigError, NoKernelError: As the
            engine finds them.
    """
    if not request.checkpoint.is_dir():
        what = "is not a folder" if request.checkpoint.exists() else "does not exist"
        raise CliError(
            f"checkpoint {request.checkpoint} {what}",
            "give the folder that holds config.json and the .safetensors files, or the parts of "
            "a Cosmos3 repository",
        )
    device = resolve_device(request.device or os.environ.get(DEVICE_VARIABLE))
    typed = {
        POLICY_VARIABLE: request.kernel_config,
        DEVICE_VARIABLE: request.device,
        DTYPE_VARIABLE: request.dtype,
        PROFILE_VARIABLE: request.autotune_cache,
        CACHE_VARIABLE: request.autotune_cache,
        GRAPHS_VARIABLE: None if request.graphs else False,
        BRANCHES_VARIABLE: request.cfg_parallel,
        TENSOR_VARIABLE: request.tensor_parallel,
    }
    with stdout_to_stderr(), status_line(f"Loading {request.checkpoint}"), flags_win(typed):
        return _construct(request, device)


def _construct(request: EngineRequest, device: str) -> "Engine":
    from phyai.engine import Engine, EngineArgs
    from phyai.models.families import detect_family

    family = detect_family(request.checkpoint)
    arguments = _cosmos3(request) if family.startswith("cosmos3") else _pi05(request)
    config = _engine_config(request, device)
    try:
        return Engine(EngineArgs(family, arguments, config))
    except ValueError as error:
        if config.parallel.ranks == 1 or isinstance(error, user_error_types()):
            raise
        raise CliError(str(error)) from None


def _cosmos3(request: EngineRequest) -> object:
    from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args
    from phyai.models.cosmos3.vae import TileConfig

    return Cosmos3Args(
        request.checkpoint,
        decoder=request.decoder,
        sound=request.decoder,
        tiling=TileConfig() if request.tiles else None,
    )


def _pi05(request: EngineRequest) -> object:
    from phyai.models.pi05.main_pi05 import PI05Args
    from phyai.models.pi05.savings import Savings

    return PI05Args(
        checkpoint_dir=request.checkpoint,
        preset=request.preset,
        stats_path=request.stats,
        tokenizer_path=request.tokenizer,
        allow_identity_norm=request.allow_identity_norm,
        savings=Savings.all() if request.savings else Savings.none(),
    )


def _engine_config(request: EngineRequest, device: str) -> "EngineConfig":
    from phyai.dispatch.config import KernelConfig
    from phyai.dispatch.types import Profile
    from phyai.engine_config import (
        DeviceConfig,
        EngineConfig,
        ParallelConfig,
        RuntimeConfig,
        parse_dtype,
    )

    precision = request.dtype or (Precision.FP32 if device == "cpu" else Precision.BF16)
    config = EngineConfig(
        device=DeviceConfig(target=device, params_dtype=parse_dtype(precision)),
        kernel=KernelConfig(
            profile=None if request.autotune_cache is None else Profile.AUTOTUNE,
            config_path=request.kernel_config,
            autotune_cache=request.autotune_cache,
        ),
        runtime=RuntimeConfig(cuda_graphs=request.graphs),
        parallel=ParallelConfig(request.cfg_parallel or 1, request.tensor_parallel or 1),
    )
    try:
        return EngineConfig.from_env(config)
    except ValueError as error:
        raise CliError(f"environment: {error}") from None


def synthetic_observation(engine: "Engine", *, seed: int = 0) -> "Observation":
    """Return random pictures of all cameras, a zero state and a plain task for a warm-up.

    Args:
        engine: Engine whose checkpoint decides cameras, resolution and state width.
        seed: Seed of the pictures.
    """
    import numpy as np

    from phyai.processing import Observation

    description = engine.describe()
    height, width = description["image_resolution"]
    random = np.random.default_rng(seed)
    return Observation(
        images={
            camera: random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            for camera in description["cameras"]
        },
        state=np.zeros(description["state_dim"], dtype=np.float32),
        task="pick up the cup",
    )
