"""1,000 mutated policies: each loads or ends in a PolicyError that names file and line.

``PHYAI_FUZZ_CASES`` is the number of policies, a hundred for each seed, and ``PHYAI_FUZZ_SEED`` the
first seed.
"""

import copy
import io
import os
import random
import re
import runpy
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from phyai.dispatch import PolicyError, load_policy
from phyai.dispatch.policy_canonical import canonical_policy, to_yaml
from phyai.dispatch.policy_schema import policy_schema
from phyai.dispatch.policy_yaml import parse_document

FIRST = int(os.environ.get("PHYAI_FUZZ_SEED", "0"))
SEEDS = range(FIRST, FIRST + max(1, int(os.environ.get("PHYAI_FUZZ_CASES", "1000")) // 100))
Checker = runpy.run_path(str(Path(__file__).with_name("json_schema.py")))["Checker"]
EXAMPLES = Path(__file__).parents[4] / "examples"
RICH = """\
schema: v1
profile: autotune
defaults: {fallback: error}
rules:
  - id: wide
    priority: 3
    match:
      op: gemm
      shape: {M: "<=64", K: "%16"}
      device.arch: ">=sm80"
      any_of: [{role: expert}, {quant.layout: null}, {quant: {fields: {activation: a16}}}]
    restrict_to: "*.gemm.*"
    fallback: reference
  - match:
      op: attention
      when: {if: {attrs.causal: true}, then: {dtype.input: [bf16, fp16]}}
      none_of: [{model.tags: slow}, {lib.flashinfer: false}]
    prefer: [flashinfer.attention, sdpa.attention]
    params: {prefill_backend: fa2}
  - match: {op: gemm, quant.granularity: block}
    prefer: humming.gemm.w4a16
    params: {compute_config: {use_f16_accum: true}, tuning_config: [[0, 64, {}]]}
overrides:
  - {id: pin, match: {op: rmsnorm, shape.hidden: [1, 2]}, use: torch.rmsnorm}
quantization:
  default: {weight: {dtype: int8, rotation_group: 64}, input: {dtype: int8}}
  rules:
    - match: {module_cls: Linear}
      scheme: null
    - match: {name: lm_head}
      weight: {dtype: fp8_e4m3, block_shape: [128, 128]}
      input: {dtype: fp8_e4m3}
"""
WORDS = [
    "schema", "profile", "defaults", "rules", "overrides", "quantization", "match", "prefer",
    "restrict_to", "use", "params", "id", "priority", "fallback", "op", "role", "shape", "shape.M",
    "device.arch", "quant", "quant.fields", "any_of", "none_of", "when", "if", "then", "weight",
    "input", "scheme", "dtype", "glob", "regex", "block_shape", "attrs.causal", "lib.x", "", "<<",
]  # fmt: skip
VALUES = [
    None, True, False, 0, 1, -1, 10**30, 1.5, "", "off", "=", "*", "a b", "gemm", "sm90", ">=sm80",
    "<8", "%0", "%16==1", "bf16", "torch.rmsnorm", "torch.*", "error", "static", "rtn", "int4",
    [], {}, [None], [[]], [1, 128], {"op": "gemm"}, {"a": {"b": {}}}, ["gemm", 3], "(", "[",
]  # fmt: skip
SNIPPETS = [
    "\t", "[", "]", "{", "}", ": ", "- ", "&a ", "*a", "!!", "|\n", "\n", "#", "'", '"', "%", "@",
    "\x07", "\ufeff", "? ", "---\n", "...\n", "\u2028", "= ", "2026-01-01", "0x1G", "!!binary x",
]  # fmt: skip


def nodes(tree, found=None):
    """Every mapping and list of a tree that is not empty."""
    found = [] if found is None else found
    if isinstance(tree, dict | list):
        if tree:
            found.append(tree)
        for item in tree.values() if isinstance(tree, dict) else tree:
            nodes(item, found)
    return found


def any_value(rng):
    """Returns one of the values, a copy: later mutations may change it in place."""
    return copy.deepcopy(rng.choice(VALUES))


def mutate_tree(tree, rng):
    """Deletes, duplicates, retypes, renames or inserts one key or item in place."""
    places = nodes(tree)
    if not places:
        return
    place = rng.choice(places)
    key = rng.choice([*place] if isinstance(place, dict) else range(len(place)))
    action = rng.choice(["delete", "duplicate", "retype", "rename", "insert"])
    if action == "delete":
        del place[key]
    elif action == "retype":
        place[key] = rng.choice([any_value(rng), [place[key]], {"x": place[key]}])
    elif isinstance(place, list):
        place.insert(key, place[key] if action == "duplicate" else any_value(rng))
    elif action == "insert":
        place[rng.choice(WORDS)] = any_value(rng)
    else:
        value = place[key] if action == "duplicate" else place.pop(key)
        typo = key[:-1] if rng.random() < 0.5 else key.upper()
        place[rng.choice([typo, rng.choice(WORDS)])] = value


def mutate_text(text, rng):
    """Breaks the YAML: a line twice, indented or cut; characters removed or inserted."""
    lines = text.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    action = rng.choice(["twice", "indent", "dedent", "cut", "remove", "insert"])
    if action == "twice":
        lines.insert(index, lines[index])
    elif action == "indent":
        lines[index] = " " * rng.randrange(1, 5) + lines[index]
    elif action == "dedent":
        lines[index] = lines[index].lstrip(" ")
    text = "".join(lines)
    place = rng.randrange(len(text))
    if action == "cut":
        return text[:place]
    if action == "remove":
        return text[:place] + text[place + rng.randrange(1, 4) :]
    return text[:place] + rng.choice(SNIPPETS) + text[place:] if action == "insert" else text


def dump(tree):
    yaml = YAML()
    yaml.width = 10_000
    stream = io.StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()


def mutant(sources, rng):
    text = rng.choice(sources)
    if rng.random() < 0.35:
        return mutate_text(text, rng)
    tree = YAML(typ="safe", pure=True).load(text)
    for _ in range(rng.randrange(1, 4)):
        mutate_tree(tree, rng)
    return dump(tree)


@pytest.fixture(scope="module")
def sources():
    files = sorted(EXAMPLES.glob("*/kernel_polic*/*.yaml"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    return [*texts, *[RICH] * len(texts)]


@pytest.fixture(scope="module")
def checker(catalog):
    return Checker(policy_schema(catalog))


def test_the_rich_policy_is_valid(tmp_path, catalog):
    path = tmp_path / "rich.yaml"
    path.write_text(RICH, encoding="utf-8")
    policy = load_policy(path, catalog=catalog)
    assert (len(policy.rules), len(policy.overrides)) == (3, 1)


def load(path, catalog):
    """The policy of a file, or the text of its PolicyError."""
    try:
        return load_policy(path, catalog=catalog)
    except PolicyError as error:
        return str(error)


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_policies_load_or_name_file_and_line(tmp_path, catalog, sources, checker, seed):
    rng = random.Random(seed)
    path = tmp_path / "fuzz.yaml"
    refused = 0
    for number in range(100):
        text = mutant(sources, rng)
        path.write_bytes(text.encode())
        repro = f"repro: PHYAI_FUZZ_SEED={seed} PHYAI_FUZZ_CASES=100 pytest {__file__}"
        try:
            outcome = load(path, catalog)
        except Exception as error:
            error.add_note(f"{repro}\nnumber {number}:\n{text}")
            raise
        where = f"{outcome}\n{repro}\nnumber {number}:\n{text}"
        if isinstance(outcome, str):
            refused += 1
            found = re.match(re.escape(str(path)) + r":(\d+): ", outcome)
            assert found, where
            assert 1 <= int(found[1]) <= len(text.splitlines()) + 1, where
            continue
        assert checker.valid(parse_document(text).data), where
        if number % 4 == 0:
            path.write_text(to_yaml(canonical_policy(path, outcome)), encoding="utf-8")
            assert load_policy(path, catalog=catalog).version == outcome.version, where
    assert 10 <= refused <= 95
