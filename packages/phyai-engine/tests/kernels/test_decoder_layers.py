"""Which row runs the layers of a decoder, and how a policy changes that."""

import pytest

from phyai.dispatch import KernelQuery, Selector, policy_from_mapping
from phyai.dispatch.catalog import build_catalog

FUSED, PERSISTENT = "triton.decoder_layers", "triton.decoder_layers.persistent"
LAYERS = "layers.decoder_layers"
PREFERENCE = {
    "rules": [
        {"id": "layers", "match": {"op": "decoder_layers"}, "prefer": [PERSISTENT, FUSED]},
    ]
}
EXPERT = {"tokens": 50, "hidden": 1024, "mlp": 4096, "heads": 8, "kv_heads": 1, "head_dim": 256}
TRAITS = {"adaptive": True, "segments": True, "shared_modulation": True}


@pytest.fixture(autouse=True)
def _with_libraries(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)


def chosen(policy=None, *, device="nvidia:sm90", dtype="bf16", format="bf16", **changes):  # noqa: A002
    catalog = build_catalog()
    rules = policy_from_mapping(policy, catalog=catalog) if policy else None
    selector = Selector(catalog, device=device, **({"policy": rules} if rules else {}))
    query = KernelQuery.build(
        "decoder_layers",
        device=device,
        dtype={"input": dtype},
        quant={"format": format},
        shape={name: changes.get(name, size) for name, size in EXPERT.items()},
        attrs={name: changes.get(name, trait) for name, trait in TRAITS.items()},
    )
    return selector.explain(query).selected


def test_the_fused_row_runs_until_a_policy_prefers_the_persistent_one():
    assert chosen() == FUSED
    assert chosen(PREFERENCE) == PERSISTENT
    assert chosen(PREFERENCE, tokens=64, hidden=512, heads=4, mlp=1024) == PERSISTENT


@pytest.mark.parametrize(
    ("changes", "selected"),
    [
        ({"tokens": 65}, FUSED),
        ({"hidden": 1536}, FUSED),
        ({"heads": 6}, FUSED),
        ({"mlp": 1536}, FUSED),
        ({"device": "nvidia:sm100"}, FUSED),
        ({"head_dim": 128}, LAYERS),
        ({"kv_heads": 2}, LAYERS),
        ({"dtype": "fp16"}, LAYERS),
        ({"format": "int8"}, LAYERS),
        ({"adaptive": False}, LAYERS),
        ({"segments": False}, LAYERS),
        ({"shared_modulation": False}, LAYERS),
        ({"device": "nvidia:sm89"}, LAYERS),
    ],
)
def test_what_the_persistent_row_is_not_for(changes, selected):
    assert chosen(PREFERENCE, **changes) == selected
