"""Random queries and policies: explain agrees with selection, parsing never ends in a traceback."""

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phyai.dispatch import (
    KernelQuery,
    NoKernelError,
    PolicyError,
    Selector,
    build_catalog,
    policy_from_mapping,
)
from phyai.dispatch.catalog import Catalog
from phyai.dispatch.policy_load import load_policy

DEVICES = ["cpu", "nvidia:sm80", "nvidia:sm90", "nvidia:sm100", "amd:gfx942"]
DTYPES = ["bf16", "fp16", "fp32", None]
FORMATS = ["bf16", "int4", "int8", "fp8_e4m3", "nvfp4", "mxfp4"]
LAYOUTS = [None, "humming", "convrot", "linear", "128x4"]


def unprepared(catalog):
    """The same rows with `prepare` replaced, so that no library is needed."""
    twin = Catalog()
    for op in catalog.ops():
        twin.register_op(catalog.spec(op))
        for impl in catalog.impls(op):
            twin.register(replace(impl, prepare=lambda facts, params: print))
    return twin


CATALOG = unprepared(build_catalog())


def random_query(rng):
    op = rng.choice(CATALOG.ops())
    spec = CATALOG.spec(op)
    roles = (*spec.dtypes, *spec.optional_dtypes)
    dims = (*spec.dims, *spec.optional_dims)
    values = {
        "layout": ["padded", "paged", "ragged"],
        "variant": ["rms", "gemma"],
        "activation": ["silu", "gelu", "gelu_tanh"],
    }
    attrs = {}
    for name, kind in (*spec.attributes.items(), *spec.optional_attributes.items()):
        if rng.random() < 0.8:
            attrs[name] = rng.choice(values.get(name, [True, False] if kind == "bool" else [None]))
    block = rng.choice([None, (1, 16), (1, 128), (128, 128)])
    quant = {
        "format": rng.choice(FORMATS),
        "layout": rng.choice(LAYOUTS),
        "block_shape": block,
        "granularity": rng.choice([None, "block", "per_channel", "per_tensor"]),
        "fields": {"activation": rng.choice(["a16", "int8", "fp8_e4m3"])},
    }
    return KernelQuery.build(
        op,
        role=rng.choice(["", "expert", "prefix"]),
        device=rng.choice(DEVICES),
        dtype={role: rng.choice(DTYPES) for role in roles if rng.random() < 0.9},
        quant=rng.choice([None, quant]),
        dims={dim: rng.choice([1, 48, 64, 72, 128, 256]) for dim in dims if rng.random() < 0.9},
        attrs=attrs,
        mode=rng.choice(["eager", "capture"]),
    )


def random_policy(rng):
    ids = CATALOG.match_ids("*")
    rules = []
    for index in range(rng.randrange(4)):
        match = rng.choice([{}, {"role": "expert"}, {"device.arch": ">=sm90"}])
        choice = {"prefer": [rng.choice(ids)]}
        if rng.random() < 0.5:
            choice = {"restrict_to": rng.choice(["*", "flashinfer.*", "torch.*", "humming.gemm.*"])}
        fallback = rng.choice(["reference", "error"])
        rules.append({"match": match, "priority": index, "fallback": fallback, **choice})
    overrides = [{"restrict_to": rng.choice(["torch.*", rng.choice(ids)])}]
    return {
        "defaults": {"fallback": rng.choice(["reference", "error"])},
        "rules": rules,
        "overrides": overrides if rng.random() < 0.3 else [],
    }


@pytest.mark.parametrize("seed", range(40))
def test_explain_equals_selection(seed, monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    rng = random.Random(seed)
    policy = policy_from_mapping(random_policy(rng), catalog=CATALOG)
    selector = Selector(CATALOG, policy, device="cpu")
    for _ in range(25):
        query = random_query(rng)
        explained = selector.explain(query)
        if explained.selected is None:
            with pytest.raises(NoKernelError) as caught:
                selector.select(query)
            assert explained.text in str(caught.value), f"seed {seed}: {query}"
            continue
        selection = selector.select(query)
        assert selection.kernel_id == explained.selected, f"seed {seed}: {query}"
        verdict = {row.kernel_id: row for row in explained.candidates}[selection.kernel_id]
        assert verdict.eligible
        assert not verdict.excluded
        impl = CATALOG.impl(selection.kernel_id)
        assert impl.when.eval(selection.facts).ok
        assert all(bool(row.reason) != row.eligible for row in explained.candidates)
        assert selector.explain(query).selected == selection.kernel_id


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from(
        [
            "gemm",
            "sm90",
            ">=sm80",
            "<=4",
            "%16",
            "bf16",
            "torch.rmsnorm",
            "torch.*",
            "off",
            "",
            "=",
            "*",
        ]
    ),
    st.text(max_size=5),
)
KEYS = st.sampled_from(
    [
        "schema",
        "profile",
        "defaults",
        "rules",
        "overrides",
        "quantization",
        "match",
        "prefer",
        "restrict_to",
        "use",
        "params",
        "id",
        "priority",
        "fallback",
        "op",
        "role",
        "shape",
        "shape.M",
        "device.arch",
        "any_of",
        "none_of",
        "when",
        "if",
        "then",
        "weight",
        "dtype",
        "glob",
    ]
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=14,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_any_mapping_is_a_policy_or_a_policy_error(data):
    with contextlib.suppress(PolicyError):
        policy_from_mapping(data, catalog=CATALOG)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.text(max_size=60),
        st.text(alphabet=" \n-:[]{}&*!|>'\"%@`#?,=abr01.", max_size=60),
    )
)
def test_any_text_is_a_policy_or_a_policy_error_with_a_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    message = "fuzz.yaml:1: "
    try:
        load_policy(path, catalog=CATALOG)
    except PolicyError as error:
        message = str(error)
    assert "fuzz.yaml" in message
