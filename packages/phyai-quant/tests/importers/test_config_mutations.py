"""Every field of every known config, replaced, removed or repeated: an error or a known plan."""

import copy
import json
import random
import warnings
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from phyai_quant import QuantConfigError, load_quant_plan
from phyai_quant.importers import registry
from phyai_quant.plan_io import VERSION, plan_from_dict
from phyai_quant.policy_section import parse_quantization_section

SHAPES = YAML(typ="safe").load((Path(__file__).parent / "config_shapes.yaml").read_text("utf-8"))
REFUSED = "refused"
WRONG = (True, False, 0, 3, -1, 1.5, "", "zzz", [], [3], ["a.b"], {}, {"zzz": 1}, [{}])

# keys whose absence has a documented meaning, so that removing them may change the plan
HAVE_DEFAULTS = {
    "activation_scheme": "dynamic",
    "weight_block_size": "one scale per row or matrix",
    "ignored_layers": "none",
    "modules_to_not_convert": "none",
    "ignore": "none",
    "exclude_modules": "none",
    "targets": "Linear",
    "input_activations": "unquantized",
    "num_bits": "8",
    "type": "int",
    "strategy": "by group size",
    "group_size": "none, or the algorithm's",
    "block_structure": "none",
    "symmetric": "true",
    "dynamic": "false; for the input of a policy true",
    "actorder": "none",
    "scale_dtype": "by format",
    "format": "by the weights",
    "kv_cache_scheme": "none",
    "kv_cache_quant_algo": "none",
    "quant_algo": "by groups or listed layers",
    "default": "unquantized",
    "input": "unquantized",
    "granularity": "by block shape",
    "block_shape": "the format's",
    "rotation_group": "none",
    "micro_scaled": "the format's; in a plan file false",
    "act_order": "false",
    "swizzled_scales": "false",
    "online": "false",
    "kv_cache": "none",
    "convrot": "by format",
    "per_row": "by the scales",
    "rules": "none",
    "config_groups": "by the algorithm",
    "quantized_layers": "none",
}
# fields of two types: the second spelling is as right as the first
TWO_TYPES = {("actorder", bool), ("dynamic", bool)}
# objects that hold the whole config
WHOLE = ("quantization_config", "compression_config", "text_config", "quantization")
# where null says something that an absent key does not
NULL_SPEAKS = ("weights", "scheme")
# objects whose keys are names of the user's own
NAMED_BY_USER = ("config_groups", "quantized_layers")


def checkpoint_config(tmp_path):
    def load(files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        plan = load_quant_plan(tmp_path)
        for name in files:
            (tmp_path / name).unlink()
        return plan

    return load


def policy_section(tmp_path):
    return lambda files: parse_quantization_section(json.loads(files["policy"]))


def plan_file(tmp_path):
    return lambda files: plan_from_dict(json.loads(files["plan"]))


def marker_file(tmp_path):
    def load(files):
        raw = files["marker"].encode()
        header, start = {}, 0
        shapes = {"comfy_quant": ("U8", [len(raw)], len(raw)), "weight": ("I8", [2, 64], 128)}
        for name, (dtype, shape, size) in {**shapes, "weight_scale": ("F32", [2], 8)}.items():
            offsets = [start, start + size]
            header[f"a.b.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            start += size
        text = json.dumps(header).encode()
        file = tmp_path / "m.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw + bytes(136))
        return load_quant_plan(file)

    return load


INT8_TOKEN = {"dtype": "int8", "granularity": "per_channel", "dynamic": True}
ROTATED = {"dtype": "int8", "granularity": "per_channel", "rotation_group": 64}
POLICY = {
    "method": "rtn",
    "stage": "load",
    "default": {"weight": {"dtype": "fp8_e4m3", "block_shape": [128, 128], "symmetric": True}},
    "rules": [
        {"id": "first", "match": {"name": "lm_head"}, "scheme": None},
        {"match": {"glob": "*.mlp.*"}, "weight": ROTATED, "input": INT8_TOKEN},
        {"match": {"regex": "a.*"}, "weight": {"dtype": "nvfp4", "micro_scaled": True}},
    ],
}
PLAN = {
    "version": VERSION,
    "source": "x",
    "rules": [
        {"match": {"name": "a"}, "scheme": {"weight": ROTATED, "input": INT8_TOKEN}, "source": "y"},
        {"match": {"regex": "b"}, "scheme": None},
    ],
    "default": {
        "weight": {
            "dtype": "nvfp4",
            "granularity": "block",
            "block_shape": [1, 16],
            "micro_scaled": True,
            "swizzled_scales": True,
            "symmetric": True,
            "act_order": True,
        },
        "online": True,
    },
    "kv_cache": {"dtype": "fp8_e4m3", "granularity": "per_tensor"},
}
MARKER = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64, "per_row": True}


def checkpoint_seeds():
    for cases in SHAPES.values():
        for case in cases:
            files = case.get("files", {})
            if "config" in case:
                files = {"config.json": {"quantization_config": case["config"]}}
            if files and case.get("plan", "none") != "none":
                yield case["name"], files


SEEDS = [
    *((checkpoint_config, name, files) for name, files in checkpoint_seeds()),
    (policy_section, "policy section", {"policy": POLICY}),
    (plan_file, "plan file", {"plan": PLAN}),
    (marker_file, "marker", {"marker": MARKER}),
]


def paths(value, prefix=()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        yield (*prefix, key)
        if isinstance(child, dict | list):
            yield from paths(child, (*prefix, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(files, path, value):
    mutated = copy.deepcopy(files)
    at(mutated, path[:-1])[path[-1]] = value
    return mutated


def removed(files, path):
    mutated = copy.deepcopy(files)
    del at(mutated, path[:-1])[path[-1]]
    return mutated


def texts(files):
    return {name: json.dumps(content) for name, content in files.items()}


def with_twice(files, path, value):
    """The JSON text of the files with the last key of the path a second time."""
    mark = "\x00mark\x00"
    marked = copy.deepcopy(files)
    at(marked, path[:-1])[mark] = value
    again = json.dumps(path[-1])
    return {n: text.replace(json.dumps(mark), again) for n, text in texts(marked).items()}


class Outcomes:
    """Loads texts and answers with the plan's fingerprint, or that it was refused."""

    def __init__(self, load):
        self.load = load
        self.count = 0

    def of(self, files):
        self.count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plan = self.load(files)
            except QuantConfigError:
                return REFUSED
        return None if plan is None else json.dumps(plan.as_dict(), sort_keys=True)


def wrong_values(original, key):
    """Values of other types than the original; an absent (null) one has no type to differ from."""
    if original is None:
        return ()
    numbers = (int, float)
    return [
        value
        for value in WRONG
        if type(value) is not type(original)
        and (key, type(value)) not in TWO_TYPES
        and not (type(value) in numbers and type(original) in numbers)
    ]


def check_null_and_removed(outcomes, files, path, original):
    key = path[-1]
    without = outcomes.of(texts(removed(files, path)))
    null = outcomes.of(texts(changed(files, path, None)))
    if not isinstance(key, str):
        assert null in {original, REFUSED}, f"null in a list changes the plan: {path}"
        return
    if key not in NULL_SPEAKS:
        assert null in {without, REFUSED, original}, f"null is not absent: {path}"
    if without not in {original, REFUSED}:
        known = key in HAVE_DEFAULTS or key in WHOLE or path[-2] in NAMED_BY_USER
        assert known, f"removing {path} changes the plan"


@pytest.fixture
def no_plugins(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: ())


@pytest.mark.parametrize(("loader", "name", "files"), SEEDS, ids=[name for _, name, _ in SEEDS])
def test_no_field_changes_a_plan_by_accident(loader, name, files, tmp_path, no_plugins):
    outcomes = Outcomes(loader(tmp_path))
    original = outcomes.of(texts(files))
    assert original not in {REFUSED, None}
    for path in paths(files):
        if len(path) == 1:
            continue
        value = at(files, path)
        check_null_and_removed(outcomes, files, path, original)
        for wrong in wrong_values(value, path[-1]):
            outcome = outcomes.of(texts(changed(files, path, wrong)))
            assert outcome in {original, REFUSED}, f"{path} = {wrong!r} changes the plan"
        if isinstance(path[-1], str) and loader in (checkpoint_config, marker_file):
            for second in (value, "zzz"):
                twice = outcomes.of(with_twice(files, path, second))
                assert twice == REFUSED, f"{path} twice is not refused"
    assert outcomes.count > 20


def test_repeated_list_entries_change_nothing(tmp_path, no_plugins):
    outcomes = Outcomes(checkpoint_config(tmp_path))
    lists = 0
    for _, files in checkpoint_seeds():
        for path in paths(files):
            value = at(files, path)
            if isinstance(value, list) and value and isinstance(value[0], str):
                once = plan_of(outcomes.of(texts(files)))
                twice = plan_of(outcomes.of(texts(changed(files, path, [*value, value[0]]))))
                assert unique_rules(once) == unique_rules(twice), path
                lists += 1
    assert lists > 20


def plan_of(outcome):
    assert outcome != REFUSED
    return json.loads(outcome)


def unique_rules(plan):
    return {**plan, "rules": list(dict.fromkeys(json.dumps(rule) for rule in plan["rules"]))}


def test_random_combinations_raise_nothing_else(tmp_path, no_plugins):
    draw = random.Random(4)
    outcomes = Outcomes(checkpoint_config(tmp_path))
    seeds = [files for _, files in checkpoint_seeds()]
    for _ in range(1500):
        files = copy.deepcopy(draw.choice(seeds))
        for _ in range(draw.randint(2, 4)):
            path = draw.choice([p for p in paths(files) if len(p) > 1] or [None])
            if path is None:
                break
            donor = draw.choice(seeds)
            value = at(donor, draw.choice([*paths(donor)])) if draw.random() < 0.5 else None
            value = draw.choice(WRONG) if value is None else value
            files = removed(files, path) if draw.random() < 0.2 else changed(files, path, value)
        outcomes.of(texts(files))
