"""`phyai explain`: single queries against the real catalog, and call sites of an engine."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from phyai.cli import engines
from phyai.cli.queries import parse_facts, query_of
from phyai.dispatch import CallSite, Selector, explain, kernel_selector_scope

GEMM = (
    *("explain", "--op", "gemm", "--fact", "shape.M=50", "--fact", "shape.N=2560"),
    *("--fact", "shape.K=1024", "--fact", "dtype.input=bf16", "--fact", "dtype.weight=bf16"),
    *("--fact", "dtype.output=bf16"),
)
POLICY = """
schema: phyai.kernel/v1
rules:
  - id: dense
    match: {op: gemm, model.family: pi05}
    restrict_to: torch.gemm.bf16
"""


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


def test_facts_are_sorted_into_the_arguments_of_a_query():
    facts = parse_facts(
        [
            "shape.M=50",
            "dtype.input=bf16",
            "attrs.causal=False",
            "attrs.layout=paged",
            "quant.format=int8",
            "quant.layout=null",
            "quant.fields.rotation_group=64",
            "quant.block_k=128",
        ]
    )
    assert facts == {
        "shape": {"M": 50},
        "dtype": {"input": "bf16"},
        "attrs": {"causal": False, "layout": "paged"},
        "quant": {
            "format": "int8",
            "layout": None,
            "fields": {"rotation_group": 64},
            "block_shape": (1, 128),
        },
    }


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("shape.M", "is not PATH=VALUE"),
        ("M=50", "is not PATH=VALUE"),
        ("=50", "is not PATH=VALUE"),
        ("device.arch=sm90", "unknown fact 'device.arch'; allowed: shape.NAME"),
    ],
)
def test_malformed_facts_are_refused(entry, words):
    with pytest.raises(ValueError, match=words):
        parse_facts([entry])


def test_a_trace_can_be_asked_again():
    quant = {"format": "int8", "layout": "convrot", "fields": {"rotation_group": 64}}
    asked = explain(
        "gemm",
        role="mlp",
        device="cpu",
        dtype={"input": "fp32"},
        quant=quant | {"block_shape": (1, 64)},
        dims={"M": 3, "N": 5, "K": 64},
    )
    again = explain("gemm", device="cpu", **query_of(asked.as_dict()))
    assert again.facts == asked.facts
    assert again.selected == asked.selected


def test_a_single_query_on_the_cpu(phyai):
    result = phyai(*GEMM, "--device", "cpu")
    assert result.code == 0
    assert result.out.splitlines()[0] == "device cpu, 1 call site"
    assert "gemm  ->  torch.gemm.bf16" in result.out
    assert "  chosen    torch.gemm.bf16" in result.out
    assert "M=50" in result.out
    rejected = [line for line in result.out.splitlines() if line.startswith("  rejected")]
    assert any("nvidia" in line for line in rejected)
    assert all(len(line.split()) > 2 for line in rejected)


def test_quant_facts_replace_the_dense_weight(phyai):
    result = phyai(*GEMM, "--device", "cpu", "--fact", "quant.format=nvfp4", "--json")
    (group,) = result.json["groups"]
    assert group["facts"]["quant.format"] == "nvfp4"
    rows = {row["kernel_id"]: row for row in group["candidates"]}
    assert "nvfp4" in rows["torch.gemm.bf16"]["reason"]


def test_a_single_query_for_a_gpu_that_is_not_here(phyai):
    result = phyai(*GEMM, "--device", "nvidia:sm90", "--json")
    (group,) = result.json["groups"]
    assert group["facts"]["device.arch"] == "sm90"
    assert group["selected"]
    cpu = phyai(*GEMM, "--device", "cpu", "--json").json["groups"][0]
    assert {row["kernel_id"] for row in cpu["candidates"]} == {
        row["kernel_id"] for row in group["candidates"]
    }


def test_a_policy_rule_is_named(phyai, policy_file):
    query = (*GEMM, "--device", "cpu", "--kernel-config", policy_file)
    result = phyai(*query, "--model", "pi05")
    assert result.out.splitlines()[0] == "device cpu, model pi05, 1 call site"
    assert "  rules     dense" in result.out
    other = phyai(*query, "--model", "other")
    assert other.out.splitlines()[0] == "device cpu, model other, 1 call site"
    assert "  rules     none matched" in other.out


def test_a_single_query_is_about_no_model(phyai, policy_file):
    query = (*GEMM, "--device", "cpu", "--kernel-config", policy_file)
    text = phyai(*query).out
    assert "  unmatched dense  model.family == 'pi05': is none" in text
    assert "model pi05" not in text
    report = phyai(*query, "--json").json
    assert report["family"] is None
    assert report["groups"][0]["facts"]["model.family"] is None
    assert "model family" not in phyai(*query, "--format", "markdown").out


def test_the_flag_wins_over_the_variable(phyai, policy_file, monkeypatch, tmp_path):
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(tmp_path / "gone.yaml"))
    assert phyai(*GEMM, "--device", "cpu", "--kernel-config", policy_file).code == 0
    result = phyai(*GEMM, "--device", "cpu")
    assert result.code == 1
    assert "gone.yaml" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give --checkpoint DIR, or one query"),
        (["--op", "gemm", "--fact", "M=1"], 2, "is not PATH=VALUE"),
        (["--checkpoint", ".", "--fact", "shape.M=1"], 2, "--fact belongs to a single query"),
        (["--op", "gem"], 1, "gemm"),
        (["--op", "gemm", "--device", "gpu9"], 1, "gpu9"),
        (["--op", "gemm", "--device", "nvidia"], 1, "lacks an architecture"),
        (["--op", "gemm", "--mode", "lazy"], 1, "mode 'lazy' is unknown"),
        (["--op", "gemm", "--kernel-config", "gone.yaml"], 1, "gone.yaml"),
    ],
)
def test_errors(phyai, arguments, code, words):
    result = phyai("explain", *arguments)
    assert result.code == code
    assert words in result.err
    assert result.err.startswith("error: ")
    assert result.out == ""


class Site(nn.Module):
    """A module with one call site, asked once."""

    def __init__(self, op, dims, dtype, quant=None, **attrs):
        super().__init__()
        self._site = CallSite(op, attrs=attrs)
        self._site.select(device=torch.device("cpu"), dtype=dtype, quant=quant, dims=dims)


class Sized:
    """An engine whose call sites are answered by the real dispatcher."""

    def __init__(self):
        self.inferred = []
        self.selector = Selector(device="cpu")
        dtype = {"input": "fp32", "weight": "fp32", "output": "fp32"}
        rows = [{"M": 6, "N": 4, "K": 8}] * 3 + [{"M": 7, "N": 4, "K": 8}]
        self.plugin = SimpleNamespace()
        with kernel_selector_scope(self.selector):
            layers = [Site("gemm", dims, dtype, {"format": "bf16"}) for dims in rows]
            norm = Site("rmsnorm", {}, {"input": "fp32"}, variant="rms")
            self.plugin.model = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": norm})
        self.plugin.call_sites = lambda: [
            module._site for module in self.plugin.model.modules() if isinstance(module, Site)
        ]

    def describe(self):
        return {"image_resolution": [28, 28], "cameras": ["base"], "state_dim": 2}

    def infer(self, observation, *, seed, num_steps):
        self.inferred.append(observation)


@pytest.fixture
def sized(monkeypatch):
    requests = []
    engine = Sized()

    def build(request):
        requests.append(request)
        return engine

    monkeypatch.setattr(engines, "build_engine", build)
    engine.requests = requests
    return engine


def test_call_sites_of_a_checkpoint_are_merged(phyai, sized, tmp_path):
    result = phyai("explain", "--checkpoint", tmp_path, "--device", "cpu", "--dtype", "fp32")
    assert result.code == 0
    assert len(sized.inferred) == 1
    assert sized.requests[0].device == "cpu"
    assert "5 call sites" in result.out.splitlines()[0]
    assert "(4 sites)" in result.out
    assert "3 x K=8 M=6 N=4" in result.out
    assert "  module    layers.[0-3]" in result.out
    assert "  module    norm" in result.out
    assert "rmsnorm" in result.out


def test_one_operation_can_be_picked(phyai, sized, tmp_path):
    result = phyai("explain", "--checkpoint", tmp_path, "--op", "rmsnorm", "--json")
    assert [group["op"] for group in result.json["groups"]] == ["rmsnorm"]
    assert result.json["sites"] == 1
    missing = phyai("explain", "--checkpoint", tmp_path, "--op", "conv")
    assert missing.code == 1
    assert "no call site of operation 'conv'" in missing.err
