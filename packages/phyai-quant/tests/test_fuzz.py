"""Whatever a config holds, the answer is a plan or a QuantConfigError.

``PHYAI_FUZZ_CASES`` is the number of cases of each test, ``PHYAI_FUZZ_SEED`` draws others, and
``PHYAI_FUZZ_REPLAY`` holds the JSON of one case, as the repro line of a failure prints it.
"""

import contextlib
import json
import os
import warnings

from hypothesis import given, seed, settings
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


def fuzz(quick):
    """The settings of a test that runs ``quick`` cases unless the environment says otherwise."""
    chosen = os.environ.get("PHYAI_FUZZ_SEED")
    count = int(os.environ.get("PHYAI_FUZZ_CASES", quick))
    configured = settings(
        max_examples=1 if "PHYAI_FUZZ_REPLAY" in os.environ else count,
        deadline=None,
        database=None,
        derandomize=chosen is None,
    )
    return configured if chosen is None else lambda test: seed(int(chosen))(configured(test))


def check(name, make, case):
    """Builds a plan of a case; a failure carries the line that repeats it."""
    replay = os.environ.get("PHYAI_FUZZ_REPLAY")
    if replay is not None:
        wanted, case = json.loads(replay)
        if wanted != name:
            return
    try:
        with contextlib.suppress(QuantConfigError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = make(case)
            assert plan is None or isinstance(plan, QuantPlan)
    except Exception as error:
        error.add_note(f"repro: PHYAI_FUZZ_REPLAY='{json.dumps([name, case])}' pytest {__file__}")
        raise


@fuzz(150)
@given(st.one_of(VALUES, st.fixed_dictionaries({"rules": st.lists(rules(VALUES), max_size=2)})))
def test_policy_sections(section):
    check("section", parse_quantization_section, section)


def plan_of(case):
    inline, standalone = case
    sources = ConfigSources(
        Section(inline, "config.json"),
        None if standalone is None else Section(standalone, "hf_quant_config.json"),
    )
    return build_plan(sources)


@fuzz(250)
@given(
    st.sampled_from(["fp8", "compressed-tensors", "modelopt"]),
    st.dictionaries(KEYS, VALUES, max_size=5),
    st.one_of(st.none(), st.dictionaries(KEYS, VALUES, max_size=4)),
)
def test_checkpoint_configs(method, inline, standalone):
    check("config", plan_of, [{"quant_method": method, **inline}, standalone])
