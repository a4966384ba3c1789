"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from phyai.cli.engines import EngineRequest, Precision
from phyai.cli.errors import CliError

Checkpoint = Annotated[
    Path,
    typer.Option(help="Folder with config.json and the .safetensors files.", metavar="DIR"),
]
OptionalCheckpoint = Annotated[
    Path | None,
    typer.Option(help="Folder with config.json and the .safetensors files.", metavar="DIR"),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda or cuda:N. Default: the GPU when there is one, else the CPU.",
        metavar="DEVICE",
        show_default=False,
    ),
]
Dtype = Annotated[
    Precision | None,
    typer.Option(
        help="Precision of weights and activations that no policy quantizes. "
        "Default: bf16 on a GPU, fp32 on the CPU.",
        show_default=False,
    ),
]
KernelConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="Kernel policy (YAML): kernel rules and quantization. "
        "Wins over the variable PHYAI_KERNEL_CONFIG.",
        metavar="FILE",
        show_default=False,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Processing preset. Default: detected from the checkpoint.",
        metavar="NAME",
        show_default=False,
    ),
]
Stats = Annotated[
    Path | None,
    typer.Option(
        help="Normalisation statistics (LeRobot stats.json or openpi norm_stats.json) "
        "that replace those of the checkpoint.",
        metavar="FILE",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        help="PaliGemma tokenizer (tokenizer.json or .model) that replaces that of the checkpoint.",
        metavar="FILE",
        show_default=False,
    ),
]
AllowIdentityNorm = Annotated[
    bool,
    typer.Option(
        "--allow-identity-norm",
        help="Run without normalisation statistics. Actions then stay in the model's own units.",
    ),
]
Images = Annotated[
    list[str],
    typer.Option(
        help="A camera and its picture, e.g. base_0_rgb=scene.jpg. Repeat for each camera; "
        "cameras left out are masked.",
        metavar="NAME=FILE",
    ),
]
Task = Annotated[str, typer.Option(help="What the robot shall do, in words.", metavar="TEXT")]
State = Annotated[
    str | None,
    typer.Option(
        help='Robot state in the robot\'s units, e.g. "0.1,0.2,-0.3".',
        metavar="NUMBERS",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the starting noise.", min=0)]
Steps = Annotated[
    int | None,
    typer.Option(help="Flow steps. Default: those of the checkpoint.", min=1, show_default=False),
]
NoSavings = Annotated[
    bool,
    typer.Option(
        "--no-savings",
        help="Also compute what does not change the result: absent cameras, prompt padding, "
        "the unused end of the last layer, per-step modulations.",
    ),
]
NoGraphs = Annotated[
    bool,
    typer.Option(
        "--no-graphs",
        help="On a GPU, launch every kernel anew instead of recording and replaying CUDA graphs.",
    ),
]
CfgParallel = Annotated[
    int | None,
    typer.Option(
        help="2 computes the two branches of guidance on devices of their own.",
        min=1,
        max=2,
        metavar="N",
        show_default=False,
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        help="Divide the large weights among this many devices, of each branch.",
        min=1,
        metavar="N",
        show_default=False,
    ),
]
Rows = Annotated[int, typer.Option(help="Rows of the action table.", min=1)]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Draw each action dimension over the chunk (needs phyai-engine\\[plot]).",
        metavar="PNG",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Save actions, normalized, prompt and seed.", metavar="NPZ", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@dataclass(frozen=True)
class Placement:
    """Where a model runs and how, for commands whose model may take several devices."""

    device: Device = None
    dtype: Dtype = None
    kernel_config: KernelConfigFile = None
    no_graphs: NoGraphs = False
    cfg_parallel: CfgParallel = None
    tensor_parallel: TensorParallel = None

    def engine(
        self, checkpoint: Path, *, decoder: bool = False, tiles: bool = False
    ) -> EngineRequest:
        """Return what to load there; see `EngineRequest` for the arguments."""
        return EngineRequest(
            checkpoint,
            self.device,
            self.dtype,
            self.kernel_config,
            graphs=not self.no_graphs,
            decoder=decoder,
            tiles=tiles,
            cfg_parallel=self.cfg_parallel,
            tensor_parallel=self.tensor_parallel,
        )


def require_folder(file: Path | None) -> None:
    """Fail before the work starts when a result file could not be written at its end.

    Raises:
        CliError: The folder of `file` does not exist.
    """
    if file is not None and not file.expanduser().resolve().parent.is_dir():
        raise CliError(f"{file}: the folder {file.parent} does not exist", "create it first")
