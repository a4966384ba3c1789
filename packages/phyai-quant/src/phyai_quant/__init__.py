"""Quantization of linear layers: which layer gets what, and how that is stored.

A config becomes a `QuantPlan`, the plan resolves a layer's name to a `QuantScheme`, and
`materialize` lowers the scheme to a weight spec that allocates, loads and reads back the tensors.
Everything before `materialize` is plain data: importing this package loads neither torch nor CUDA.
"""

from phyai_quant.active import get_active_plan, use_quant_plan
from phyai_quant.checkpoint import load_quant_plan
from phyai_quant.materialize import materialize
from phyai_quant.plan import QuantPlan
from phyai_quant.rules import Matcher, Rule
from phyai_quant.scheme import (
    Granularity,
    QDType,
    QuantConfigError,
    QuantScheme,
    TensorQuant,
)

__all__ = [
    "Granularity",
    "Matcher",
    "QDType",
    "QuantConfigError",
    "QuantPlan",
    "QuantScheme",
    "Rule",
    "TensorQuant",
    "get_active_plan",
    "load_quant_plan",
    "materialize",
    "use_quant_plan",
]
