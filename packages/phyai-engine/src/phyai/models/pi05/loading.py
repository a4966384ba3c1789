"""From a checkpoint folder to a ready model."""

from pathlib import Path

import torch

from phyai.checkpoints import CheckpointReader, load_into
from phyai.checkpoints.planned import model_tensors
from phyai.layers import Embedding, Linear, UnusedLinear
from phyai.layers.stored_dtypes import check_stored_dtypes
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.keys import EMBEDDING, UNUSED_EMBEDDING, UNUSED_HEAD, canonical
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.savings import Savings
from phyai_quant import QuantPlan, get_active_plan
from phyai_quant.checkpoint import check_unquantized_dtypes
from phyai_quant.plan import warn_unmatched


def load_pi05(
    checkpoint_dir: Path | str,
    *,
    device: torch.device | str = "cpu",
    params_dtype: torch.dtype = torch.float32,
    savings: Savings | None = None,
) -> PI05Model:
    """Loads π0.5 or π0 from LeRobot's or openpi's PyTorch layout.

    Every tensor of the file is accounted for. Weight formats come from the active quantization plan
    (see ``phyai_quant.use_quant_plan``).

    Args:
        checkpoint_dir: folder with ``config.json`` and safetensors weights.
        device: where the model lives.
        params_dtype: of weights and activations.
        savings: exact simplifications to use; all by default.

    Raises:
        CheckpointError: if files or tensors are missing, unexpected or do not fit.
        QuantConfigError: if the file holds quantized tensors that no rule explains, or unquantized
            ones where a rule says otherwise.
    """
    directory = Path(checkpoint_dir)
    reader = CheckpointReader(directory, canonical)
    config = PI05Config.read(directory, reader.logical_shapes())
    plan = get_active_plan()
    check_unquantized_dtypes(reader.dtypes, plan)
    model = PI05Model(config, params_dtype=params_dtype, device=device, savings=savings)
    if plan is not None:
        _warn_about_unused_rules(model, plan)
        check_stored_dtypes(model, reader.dtypes, plan)
    # A GPU casts faster than the host, and 16-bit weights need no copy on the host at all.
    place = device if torch.device(device).type == "cuda" else "cpu"
    load_into(model, model_tensors(reader, plan, place), source=str(directory))
    return model.eval()


def _warn_about_unused_rules(model: PI05Model, plan: QuantPlan) -> None:
    layers: dict[str, type | str | None] = {}
    for module in model.modules():
        if isinstance(module, Linear):
            layers[module.prefix] = type(module)
        elif isinstance(module, UnusedLinear):
            layers[module.name] = Linear
    layers[UNUSED_HEAD] = Linear
    tables = (*(name.removesuffix(".weight") for name in EMBEDDING), UNUSED_EMBEDDING)
    layers.update(dict.fromkeys(tables, Embedding))
    warn_unmatched(plan, layers)
