"""10,000 random questions to the whole catalog: explain, selection and the rules they follow agree.

A question aims at one row: facts are drawn so that its condition often holds, and then disturbed.
"""

import random
from dataclasses import replace

import pytest

from phyai.dispatch import (
    KernelMode,
    KernelQuery,
    ModelContext,
    NoKernelError,
    PolicyError,
    Selector,
    build_catalog,
    policy_from_mapping,
)
from phyai.dispatch.catalog import Catalog
from phyai.dispatch.facts import FactKind
from phyai.dispatch.leaves import Compare, IsNone, Modulus, OneOf
from phyai.dispatch.predicate import And, Leaf, Not, Or

SEEDS, POLICIES, QUESTIONS = 10, 25, 40
DEVICES = ("cpu", "nvidia:sm80", "nvidia:sm89", "nvidia:sm90", "nvidia:sm100", "amd:gfx942")
DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "int8")
ROLES = ("", "expert", "prefix", "language", "head")


def portable_copy(catalog):
    """The same rows, each prepared as its own name, so that no library is needed."""
    twin = Catalog()
    for op in catalog.ops():
        twin.register_op(catalog.spec(op))
        for impl in catalog.impls(op):
            name = impl.kernel_id
            twin.register(replace(impl, prepare=lambda facts, params, name=name: lambda: name))
    return twin


CATALOG = portable_copy(build_catalog())
IDS = CATALOG.match_ids("*")


def leaves(predicate, rng):
    """Yield tests whose truth makes ``predicate`` true, taking one side of every alternative."""
    if isinstance(predicate, And):
        for part in predicate.parts:
            yield from leaves(part, rng)
    elif isinstance(predicate, Or):
        yield from leaves(rng.choice(predicate.parts), rng)
    elif isinstance(predicate, Not):
        return
    elif isinstance(predicate, Leaf):
        yield predicate


def wished(leaf, rng):
    """A value that passes ``leaf``, where that is easy to say."""
    if isinstance(leaf, Compare):
        step = {"<": -1, ">": 1, "!=": 1}.get(leaf.op, 0)
        return leaf.value + step if step and isinstance(leaf.value, int) else leaf.value
    if isinstance(leaf, OneOf):
        return rng.choice(leaf.values)
    if isinstance(leaf, Modulus):
        return leaf.remainder + leaf.modulus * rng.choice([1, 2, 8])
    return None if isinstance(leaf, IsNone) else ...


def random_facts(rng):
    """Return operation and facts by path, most of which suit one random row."""
    target = CATALOG.impl(rng.choice(IDS))
    spec = CATALOG.spec(target.op)
    facts = {f"dtype.{name}": rng.choice(DTYPES) for name in spec.dtypes}
    facts |= {f"shape.{name}": rng.choice([1, 7, 64, 128, 256]) for name in spec.dims}
    for name, kind in (*spec.attributes.items(), *spec.optional_attributes.items()):
        facts[f"attrs.{name}"] = rng.random() < 0.5 if kind is FactKind.BOOL else rng.choice([1, 8])
    for leaf in leaves(target.when, rng):
        value = wished(leaf, rng)
        if value is not ... and rng.random() < 0.97:
            facts[leaf.path] = value
    for path in list(facts):
        if rng.random() < 0.03:
            del facts[path]
    return target.op, facts


def random_query(rng):
    op, facts = random_facts(rng)

    def part(prefix):
        return {
            path.removeprefix(prefix): value
            for path, value in facts.items()
            if path.startswith(prefix) and not path.startswith("quant.fields.")
        }

    quant = part("quant.")
    block = quant.pop("block_k", None)
    fields = {
        path.removeprefix("quant.fields."): value
        for path, value in facts.items()
        if path.startswith("quant.fields.")
    }
    if fields:
        quant["fields"] = fields
    if isinstance(block, int):
        quant["block_shape"] = (1, block)
    return KernelQuery.build(
        op,
        role=rng.choice(ROLES),
        device=rng.choice([None, *DEVICES]),
        model=rng.choice([None, ModelContext("pi05"), ModelContext("cosmos3", frozenset({"a"}))]),
        dtype=part("dtype."),
        quant=quant or None,
        dims=part("shape."),
        attrs=part("attrs."),
        mode=rng.choice(list(KernelMode)),
    )


def random_match(rng, *, nested=True):
    entries = {
        "role": rng.choice(["expert", ["expert", "prefix"]]),
        "device.arch": rng.choice(["sm90", ">=sm89", ["sm80", "sm90"]]),
        "device.vendor": rng.choice(["cpu", "nvidia"]),
        "model.family": "pi05",
        "model.tags": "a",
        "quant.format": rng.choice([None, "bf16", "int8", ["int4", "nvfp4"]]),
        "quant.layout": rng.choice([None, "humming", "convrot"]),
        "dtype.input": rng.choice(["bf16", ["bf16", "fp16"]]),
        "shape.M": rng.choice([64, "<=64", "%16", None]),
    }
    names = rng.sample(sorted(entries), rng.choice([0, 1, 1, 2]))
    match = {name: entries[name] for name in names}
    if nested and rng.random() < 0.3:
        inner = [random_match(rng, nested=False) or {"role": "head"} for _ in range(2)]
        key = rng.choice(["all_of", "any_of", "none_of", "when"])
        match[key] = dict(zip(("if", "then"), inner, strict=True)) if key == "when" else inner
    return match


def random_policy(rng):
    """A policy of up to five rules; None where the draw contradicts itself."""

    def rule(strict):
        entry = {"match": random_match(rng), "priority": rng.randrange(6)}
        if rng.random() < 0.5:
            backend = rng.choice(IDS).split(".")[0]
            entry["restrict_to"] = rng.choice(["*", f"{backend}.*", rng.choice(IDS)])
        elif strict:
            entry["use"] = rng.choice(IDS)
        else:
            op = CATALOG.impl(rng.choice(IDS)).op
            rows = [impl.kernel_id for impl in CATALOG.impls(op)]
            entry["prefer"] = rng.sample(rows, min(len(rows), 3))
        if not strict and rng.random() < 0.4:
            entry["fallback"] = rng.choice(["reference", "error"])
        return entry

    data = {
        "defaults": {"fallback": rng.choice(["reference", "error"])},
        "rules": [rule(False) for _ in range(rng.randrange(5))],
        "overrides": [rule(True)] if rng.random() < 0.2 else [],
    }
    try:
        return policy_from_mapping(data, catalog=CATALOG)
    except PolicyError:
        return None


def expected(policy, query, hints, facts):
    """What the documented order of a choice gives: an independent, plain statement of it."""
    rows = CATALOG.impls(query.op)
    usable = {
        row.kernel_id: row
        for row in rows
        if row.when.eval(facts).ok and (query.mode is KernelMode.EAGER or row.capture_safe)
    }
    for group in (policy.overrides, policy.rules):
        matched = [rule for rule in group if rule.match.eval(facts).ok]
        if not matched:
            continue
        rule = max(matched, key=lambda item: item.priority)
        order = [name for name in rule.candidates(CATALOG) if name in usable]
        if group is policy.rules and (rule.fallback or policy.fallback) == "reference":
            order += [name for name, row in usable.items() if row.reference]
        return order[0] if order else None
    references_only = all(row.reference for row in rows)
    usable = {name: row for name, row in usable.items() if not row.explicit}
    order = [name for name in hints if name in usable] + list(usable)
    if policy.fallback == "error" and not references_only:
        order = [name for name in order if not usable[name].reference]
    return order[0] if order else None


def check(selector, query, hints):
    """Check one question and return the row that was chosen, None or ``"conflict"``."""
    try:
        explained = selector.explain(query, hints)
    except PolicyError as error:
        conflict = str(error)
        with pytest.raises(PolicyError) as caught:
            selector.select(query, hints)
        assert conflict == str(caught.value)
        return "conflict"
    deciding = [rule.id for rule in explained.rules if rule.decides]
    assert deciding == list(explained.matched_rules)
    assert all(bool(rule.reason) != rule.decides for rule in explained.rules)
    assert all(bool(row.reason) != row.eligible for row in explained.candidates)
    if explained.selected is None:
        with pytest.raises(NoKernelError) as caught:
            selector.select(query, hints)
        assert explained.text in str(caught.value)
        complete = replace(query, device=query.device or selector.device)
        facts = CATALOG.entry(query.op).facts(
            replace(complete, model=query.model or selector.model)
        )
    else:
        selection = selector.select(query, hints)
        assert selection.kernel_id == selection.execute() == explained.selected
        assert selection.trace.rules == explained.rules
        facts = selection.facts
    verdicts = {row.kernel_id: row for row in explained.candidates}
    for impl in CATALOG.impls(query.op):
        if query.mode is KernelMode.EAGER or impl.capture_safe:
            outcome = impl.when.eval(facts)
            assert verdicts[impl.kernel_id].eligible == outcome.ok
            assert verdicts[impl.kernel_id].reason == outcome.reason
    assert explained.selected == expected(selector.policy, query, hints, facts)
    return explained.selected


@pytest.fixture
def with_libraries(monkeypatch):
    """Every library is there, so that all rows can be reached."""
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_explain_selection_and_the_documented_order_agree(seed, with_libraries):
    rng = random.Random(seed)
    chosen = []
    for number in range(POLICIES):
        policy = None
        while policy is None:
            policy = random_policy(rng)
        selector = Selector(CATALOG, policy, device=rng.choice(DEVICES))
        for question in range(QUESTIONS):
            query = random_query(rng)
            hints = tuple(rng.sample(IDS, 2)) if rng.random() < 0.3 else ()
            try:
                chosen.append(check(selector, query, hints))
            except AssertionError as error:
                where = f"seed {seed}, policy {number}, question {question}"
                raise AssertionError(f"{where}: {query}\n{error}") from error
    rows = set(chosen) - {None, "conflict"}
    assert len(chosen) == POLICIES * QUESTIONS
    # The questions reach most of the catalog, not only its references.
    assert len(rows) > len(IDS) / 3, f"only {len(rows)} of {len(IDS)} rows were chosen"
    assert chosen.count(None) < len(chosen) / 2
