"""Offline validation of quantized weights: reads every value, reports per tensor.

Inference, loading and weight wrappers never call this; an exporter or a checkpoint tool does,
explicitly. ``python -m piper_kernels.weights.validate FILE`` is the command.
"""

from piper_kernels.weights.validate._findings import Check, Finding
from piper_kernels.weights.validate._sources import validate_file, validate_state_dict

__all__ = ["Check", "Finding", "validate_file", "validate_state_dict"]
