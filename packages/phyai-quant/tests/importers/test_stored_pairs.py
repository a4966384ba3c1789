"""What the compressed-tensors importer accepts is what the weight formats store, and no less."""

import itertools

import pytest

from phyai_quant import QuantConfigError, QuantScheme, materialize
from phyai_quant.importers.base import ConfigSources, Section
from phyai_quant.importers.registry import build_plan
from phyai_quant.importers.tensor_args import read_tensor_args

KINDS = [("int", 8), ("int", 4), ("float", 8), ("float", 4)]
STRATEGIES = [
    {"strategy": "tensor"},
    {"strategy": "channel"},
    {"strategy": "token"},
    {"strategy": "group", "group_size": 32},
    {"strategy": "group", "group_size": 128},
    {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    {"strategy": "tensor_group", "group_size": 16},
    {"strategy": "block", "block_structure": [128, 128]},
]


def readable(*, is_input):
    """Every distinct quantization that arguments of one tensor can say, with the arguments."""
    found = {}
    for (kind, bits), strategy, symmetric, dynamic in itertools.product(
        KINDS, STRATEGIES, (True, False), (False, True, "local")
    ):
        args = {"type": kind, "num_bits": bits, "symmetric": symmetric, "dynamic": dynamic}
        args |= strategy
        try:
            quant = read_tensor_args(Section(args, "f", "w"), is_input=is_input)
        except QuantConfigError:
            continue
        found.setdefault(quant, args)
    return found


WEIGHTS = readable(is_input=False)
INPUTS = {None: None, **readable(is_input=True)}


def imported(weight, act):
    group = {"targets": ["Linear"], "weights": weight, "input_activations": act}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    try:
        return build_plan(ConfigSources(Section(config, "c.json"))).resolve("a.b", "Linear")
    except QuantConfigError:
        return None


def stored(scheme):
    try:
        return materialize(scheme) is not None
    except QuantConfigError:
        return False


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight.describe())
def test_importer_and_formats_agree(weight):
    verdicts = set()
    for act, args in INPUTS.items():
        scheme = imported(WEIGHTS[weight], args)
        assert scheme in (None, QuantScheme(weight, act))
        assert (scheme is not None) is stored(QuantScheme(weight, act)), act and act.describe()
        verdicts.add(scheme is not None)
    assert verdicts == {True, False}


def test_the_arguments_cover_the_formats():
    assert len(WEIGHTS) > 30
    assert len(INPUTS) > 30
