"""The rule by which helpers install passes in compile options."""

import copy
import importlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from piper_kernels._compile import passes
from piper_kernels._compile.passes import OPTION, GraphRewritePass, PassSequence, install_passes
from piper_kernels.linear.convrot import convrot_int8_compile_options


class Base(GraphRewritePass):
    def rewrite(self, graph):
        graph.rewritten = True
        return False


class Fusion(Base):
    sources = ("linear/convrot/int8/_compile.py",)


def other(graph):
    graph.other = True


def before(graph):
    graph.before = True


base, fusion = Base(), Fusion()


def test_absent_gives_the_pass_itself_and_keeps_other_options():
    given = {"max_autotune": True}
    result = install_passes(given, base)
    assert result == {"max_autotune": True, OPTION: base}
    assert given == {"max_autotune": True}
    assert install_passes(None, base)[OPTION] is base


def test_a_single_other_pass_goes_first():
    assert install_passes({OPTION: other}, base)[OPTION] == (other, base)


@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences_are_extended_without_mutation(kind):
    given = {OPTION: kind([other])}
    assert install_passes(given, base)[OPTION] == (other, base)
    assert given == {OPTION: kind([other])}


@pytest.mark.parametrize("existing", [None, base, [base], (other, base), (base, other)])
def test_twice_equals_once(existing):
    once = install_passes({OPTION: existing}, base)
    assert install_passes(once, base) == once
    both = install_passes(once, base, fusion)
    assert install_passes(both, base, fusion) == both
    assert install_passes(both, base) == both


def test_a_fusion_goes_directly_before_the_base_pass():
    assert install_passes(None, base, fusion)[OPTION] == (fusion, base)
    given = {OPTION: (before, base, other)}
    assert install_passes(given, base, fusion)[OPTION] == (before, fusion, base, other)


def test_copied_options_are_not_extended_again():
    options = convrot_int8_compile_options()
    for copied in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert convrot_int8_compile_options(copied)[OPTION] == options[OPTION]
        assert not isinstance(convrot_int8_compile_options(copied)[OPTION], tuple)


def test_uuid_is_stable_between_processes_and_differs_between_passes():
    code = (
        "from piper_kernels.linear.convrot import convrot_int8_compile_options as options\n"
        "print(options()['post_grad_custom_pre_pass'].uuid().hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    mine = convrot_int8_compile_options()[OPTION].uuid()
    assert isinstance(mine, bytes)
    assert printed.stdout.strip() == mine.hex()
    # Passes of the same sources are not the same.
    assert len({mine, base.uuid(), fusion.uuid()}) == 3


def test_a_changed_source_changes_the_uuid(tmp_path, monkeypatch):
    (tmp_path / "_compile").mkdir()
    source = tmp_path / "_compile" / "rewrite.py"
    monkeypatch.setattr(passes, "_PACKAGE", tmp_path)
    identities = []
    for text in ("a", "a", "b"):
        source.write_text(text)
        passes._hash_sources.cache_clear()
        identities.append(base.uuid())
    passes._hash_sources.cache_clear()
    assert identities[0] == identities[1] != identities[2]


HELPERS = [
    "linear.convrot.convrot_int8_compile_options",
    "linear.nvfp4.nvfp4_compile_options",
    "linear.convrot.nvfp4.convrot_nvfp4_compile_options",
    *(
        f"fusions.{fmt}_{activation}_ffn.{fmt}_{activation}_ffn_compile_options"
        for fmt in ("convrot_int8", "nvfp4", "convrot_nvfp4")
        for activation in ("swiglu", "gelu")
    ),
    *(
        f"fusions.{name}.{name}_compile_options"
        for name in (
            "convrot_int8_sparse_piper",
            "nvfp4_sparse_piper",
            "convrot_nvfp4_sparse_piper",
            "convrot_int8_piper",
        )
    ),
]


def helper(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"piper_kernels.{module}"), name)


@pytest.mark.parametrize("path", HELPERS)
def test_every_helper_is_ordered_and_idempotent(path):
    options = helper(path)
    once = options({"max_autotune": True, OPTION: [other]})
    assert options(once) == once
    installed = once[OPTION][1:]
    assert len(installed) == (2 if "fusions" in path else 1)
    for item in installed:
        assert isinstance(item, GraphRewritePass)
        assert len(item.uuid()) == 32
        for source in item.sources:
            assert (passes._PACKAGE / source).exists(), source
    base = next(item for item in installed if type(item).__name__.endswith("LinearPass"))
    assert options({OPTION: (before, base, other)})[OPTION] == (before, *installed, other)


def test_fusions_combine_in_front_of_one_base_pass():
    gelu, swiglu = helper(HELPERS[4]), helper(HELPERS[3])
    both = swiglu(gelu())[OPTION]
    assert len(both) == 3
    assert both[2:] == (convrot_int8_compile_options()[OPTION],)
    assert len({item.uuid() for item in gelu()[OPTION]}) == 2


def test_training_graphs_are_left_alone():
    graph = torch.fx.Graph()
    graph.output(())
    base(graph, is_inference=False)
    assert not hasattr(graph, "rewritten")
    base(graph)  # nothing is traced, so it is not known to be for inference
    assert not hasattr(graph, "rewritten")
    base(graph, is_inference=True)
    assert graph.rewritten


def test_a_sequence_runs_its_passes_and_has_an_identity_if_all_have():
    class Tagged(CustomGraphPass):
        def __call__(self, graph):
            graph.tagged = True

        def uuid(self):
            return b"tagged"

    graph = torch.fx.Graph()
    PassSequence((before, Tagged()))(graph)
    assert graph.before
    assert graph.tagged
    assert PassSequence((Tagged(), base)).uuid() == (b"tagged", base.uuid())
    assert PassSequence((Tagged(), before)).uuid() is None


def test_importing_a_linear_does_not_load_inductor_passes():
    code = (
        "import sys, piper_kernels.linear.convrot\n"
        "assert 'piper_kernels._compile.passes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
