"""From a checkpoint folder to a ready transformer."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phyai.checkpoints import CheckpointError, CheckpointReader, load_into
from phyai.checkpoints.planned import model_tensors
from phyai.layers import Embedding, Linear, UnusedLinear
from phyai.layers.stored_dtypes import check_stored_dtypes
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.media import DomainTable
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.parallel import Parallel
from phyai_quant import QuantPlan, get_active_plan
from phyai_quant.checkpoint import check_unquantized_dtypes
from phyai_quant.plan import warn_unmatched

STEM = "diffusion_pytorch_model"
"""Name of the weight files in the layout of diffusers."""

_REASONER = re.compile(
    r"(lm_head|vision_encoder|vision_model|vision_tower|visual|multi_modal_projector)\."
)
"""Tensors of the vision-language reasoner, which no generation or policy mode runs."""


def load_transformer(
    checkpoint_dir: Path | str,
    *,
    device: torch.device | str = "cpu",
    params_dtype: torch.dtype = torch.bfloat16,
    domains: Sequence[int] | None = None,
    parallel: Parallel | None = None,
) -> Cosmos3Transformer:
    """Loads ``transformer/`` of a Cosmos3 repository, in the layout of diffusers.

    Every tensor of the files is accounted for. Those of the reasoner's output head and vision
    encoder are left out; of action tables only the rows of ``domains`` are read. Weight formats
    come from the active quantization plan (see ``phyai_quant.use_quant_plan``).

    Args:
        checkpoint_dir: the repository, or its ``transformer`` folder.
        device: where the model lives.
        params_dtype: of weights and activations.
        domains: ids of the embodiments to serve; all if None.
        parallel: this process's place among those that serve one request.

    Raises:
        CheckpointError: if files or tensors are missing, unexpected or do not fit.
        QuantConfigError: if the files hold quantized tensors that no rule explains, or unquantized
            ones where a rule says otherwise.
        ValueError: for embodiments or a degree of parallelism that the model does not have.
    """
    directory = transformer_folder(checkpoint_dir)
    config = Cosmos3Config.from_json(directory)
    reader = CheckpointReader(directory, _generative, stem=_stem(directory))
    plan = get_active_plan()
    check_unquantized_dtypes(reader.dtypes, plan)
    model = Cosmos3Transformer(
        config, params_dtype=params_dtype, device=device, domains=domains, parallel=parallel
    )
    if plan is not None:
        _warn_about_unused_rules(model, plan)
        check_stored_dtypes(model, reader.dtypes, plan)
    # A GPU casts faster than the host, and 16-bit weights need no copy on the host at all.
    place = device if torch.device(device).type == "cuda" else "cpu"
    tensors = model_tensors(reader, plan, place)
    tensors |= _served_rows(model, reader, place)
    # Of layers that are not needed only shapes are checked.
    layers = {module.name for module in model.modules() if isinstance(module, UnusedLinear)}
    for name in tensors:
        if name.rpartition(".")[0] in layers:
            shape = reader.shapes[name]
            tensors[name] = lambda shape=shape: torch.empty(shape, device="meta")
    load_into(model, tensors, source=str(directory))
    return model.eval()


def transformer_folder(checkpoint_dir: Path | str) -> Path:
    """Returns the ``transformer`` folder of a repository, or the folder itself if it is one."""
    directory = Path(checkpoint_dir)
    nested = directory / "transformer"
    return nested if nested.is_dir() else directory


def _stem(directory: Path) -> str:
    """Returns the name of the weight files or of their index; quantizing tools use another."""
    for stem in (STEM, "model"):
        names = (f"{stem}.safetensors", f"{stem}.safetensors.index.json")
        if any((directory / name).is_file() for name in names):
            return stem
    return STEM


def _generative(name: str) -> str | None:
    return None if _REASONER.match(name) else name


def _served_rows(
    model: Cosmos3Transformer, reader: CheckpointReader, place: torch.device | str
) -> dict[str, Callable[[], Tensor]]:
    """Returns readers of the served rows of action tables, which are whole in the checkpoint."""
    count = model.config.num_embodiment_domains
    found: dict[str, Callable[[], Tensor]] = {}
    for module in model.modules():
        if not isinstance(module, DomainTable):
            continue
        for part, held in (("fc", module.weight), ("bias", module.bias)):
            name, needed = f"{module.name}.{part}.weight", (count, held[0].numel())
            if name not in reader.shapes:
                continue

            def read(name: str = name, needed: tuple[int, int] = needed) -> Tensor:
                if reader.shapes[name] != needed:
                    raise CheckpointError(
                        f"{name}: the checkpoint has shape {reader.shapes[name]}, the model needs "
                        f"{needed}"
                    )
                return reader.get_rows(name, model.domains, place)

            found[name] = read
    return found


def _warn_about_unused_rules(model: Cosmos3Transformer, plan: QuantPlan) -> None:
    layers: dict[str, type | str | None] = {"lm_head": Linear, "embed_tokens": Embedding}
    for module in model.modules():
        if isinstance(module, Linear):
            layers[module.prefix] = type(module)
            layers.update(dict.fromkeys(module.stored, type(module)))
        elif isinstance(module, UnusedLinear):
            layers[module.name] = Linear
        elif isinstance(module, DomainTable):
            layers |= {f"{module.name}.fc": Linear, f"{module.name}.bias": Linear}
    warn_unmatched(plan, layers)
