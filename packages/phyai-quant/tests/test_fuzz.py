"""Whatever a config holds, the answer is a plan or a QuantConfigError."""

import contextlib
import warnings

from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_quant import QuantConfigError, QuantPlan
from phyai_quant.importers.base import ConfigSources, Section
from phyai_quant.importers.registry import build_plan
from phyai_quant.policy_section import parse_quantization_section

WORDS = st.just("") | st.sampled_from(
    [
        "a.b",
        "re:(",
        "re:a",
        "Linear",
        ".",
        "fp8",
        "FP8",
        "NVFP4",
        "MIXED_PRECISION",
        "int8",
        "int4",
        "block",
        "group",
        "per_channel",
        "tensor",
        "static",
        "local",
        "rtn",
        "128x128",
        "W4A16",
    ]
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2, 300), st.floats(), WORDS)
KEYS = st.sampled_from(
    [
        "match",
        "name",
        "glob",
        "regex",
        "scheme",
        "weight",
        "input",
        "dtype",
        "granularity",
        "block_shape",
        "symmetric",
        "dynamic",
        "rotation_group",
        "micro_scaled",
        "rules",
        "default",
        "config_groups",
        "targets",
        "weights",
        "input_activations",
        "num_bits",
        "type",
        "strategy",
        "group_size",
        "block_structure",
        "actorder",
        "ignore",
        "format",
        "kv_cache_scheme",
        "stage",
        "weight_block_size",
        "activation_scheme",
        "ignored_layers",
        "quant_algo",
        "quantization",
        "exclude_modules",
        "quantized_layers",
        "kv_cache_quant_algo",
        "id",
        "W4A16",
        "a.b",
    ]
)
VALUES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(KEYS, children, max_size=4)
    ),
    max_leaves=12,
)


def rules(values):
    tensors = st.dictionaries(
        st.sampled_from(["dtype", "granularity", "block_shape", "dynamic", "rotation_group"]),
        values,
    )
    return st.fixed_dictionaries(
        {"match": st.dictionaries(st.sampled_from(["name", "glob", "regex"]), WORDS, max_size=2)},
        optional={"weight": tensors, "input": tensors, "scheme": values},
    )


def check(make):
    with contextlib.suppress(QuantConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = make()
        assert plan is None or isinstance(plan, QuantPlan)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(VALUES, st.fixed_dictionaries({"rules": st.lists(rules(VALUES), max_size=2)})))
def test_policy_sections(section):
    check(lambda: parse_quantization_section(section))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    st.sampled_from(["fp8", "compressed-tensors", "modelopt"]),
    st.dictionaries(KEYS, VALUES, max_size=5),
    st.one_of(st.none(), st.dictionaries(KEYS, VALUES, max_size=4)),
)
def test_checkpoint_configs(method, inline, standalone):
    sources = ConfigSources(
        Section({"quant_method": method, **inline}, "config.json"),
        None if standalone is None else Section(standalone, "hf_quant_config.json"),
    )
    check(lambda: build_plan(sources))
