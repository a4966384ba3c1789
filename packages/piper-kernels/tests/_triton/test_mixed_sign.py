"""Marked products become unsigned by signed, and nothing else changes."""

import re
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piper_kernels._triton import mixed_sign
from piper_kernels._triton.mixed_sign import MARKER, MixedSignError, mixed_sign_dots
from piper_kernels._triton.mixed_sign_rewrite import rewrite_products

NVIDIA = {name: GPUTarget("cuda", int(name[3:]), 32) for name in ("sm_80", "sm_86", "sm_89")}
NVIDIA |= {name: GPUTarget("cuda", int(name[3:]), 32) for name in ("sm_90", "sm_120")}
AMD = {name: GPUTarget("hip", name, 32) for name in ("gfx1200", "gfx1201")}
TARGETS = NVIDIA | AMD
PRODUCTS = re.compile(r"(?:mma\.sync|wgmma\.mma_async)[\w.]*\.s32\.(\w\d\.\w\d)|(neg_lo:\[.,.,0\])")
SIGNED = {"s8.s8", "neg_lo:[1,1,0]"}
MIXED = {"u8.s8", "neg_lo:[1,0,0]"}


@pytest.fixture(scope="module")
def kernels(load_module):
    return load_module(Path(__file__).with_name("mixed_sign_kernels.py"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert knobs.runtime.add_stages_inspection_hook is None
    yield
    assert knobs.runtime.add_stages_inspection_hook is None


def build(kernel, target, warps=4, **constants):
    constants |= {"REGISTER": "=v,v" if target in AMD else "=r,r"}
    pointers = {"left": "*i8", "right": "*i8", "out": "*i32"}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps})


def products(compiled):
    """Count the products of machine code by the signs of their operands."""
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return Counter(first or second for first, second in PRODUCTS.findall(text))


@pytest.mark.parametrize("target", TARGETS)
def test_only_marked_products_change(target, kernels):
    unmarked = products(build(kernels.two_products_kernel, target, MARK=False))
    with mixed_sign_dots():
        found = build(kernels.two_products_kernel, target, MARK=True)
        again = products(build(kernels.two_products_kernel, target, MARK=False))
    assert again == unmarked
    assert set(unmarked) <= SIGNED
    counts = products(found)
    half = unmarked.total() // 2
    assert {counts[name] for name in counts} == {half}
    assert len(SIGNED & set(counts)) == len(MIXED & set(counts)) == 1
    assert MARKER not in "".join(map(str, (found.asm.get("ptx"), found.asm.get("amdgcn"))))


@pytest.mark.parametrize("target", AMD)
def test_amd_products_have_an_unsigned_left_operand(target, kernels):
    """A quarter as many rows on the left as columns on the right: a quarter of the registers."""
    kernel, constants = kernels.accumulating_kernel, {"FROM_ZERO": True, "ROWS": 16}
    with mixed_sign_dots():
        text = build(kernel, target, warps=1, **constants).asm["llir"]
    operand = r"i1 (\w+), <2 x i32> (%[\w.]+)"
    found = re.findall(rf"wmma\.i32\.16x16x16\.iu8\.[\w.]+\({operand}, {operand}, ", text)
    assert len(found) > 0
    unsigned = {product[product.index("false") + 1] for product in found}
    signed = {product[product.index("true") + 1] for product in found}
    assert 4 * len(unsigned) == len(signed)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx1201"])
def test_a_sum_over_a_loop_is_rewritten(target, kernels):
    with mixed_sign_dots():
        found = products(build(kernels.accumulating_kernel, target, FROM_ZERO=True, ROWS=64))
    assert found.total() > 0
    assert set(found) <= MIXED


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx1201"])
def test_a_sum_that_starts_elsewhere_is_refused(target, kernels):
    with mixed_sign_dots(), pytest.raises(MixedSignError, match=r"from constants|from outside"):
        build(kernels.accumulating_kernel, target, FROM_ZERO=False, ROWS=64)


def test_a_value_without_a_product_is_refused(kernels):
    with mixed_sign_dots(), pytest.raises(MixedSignError, match="accumulator"):
        build(kernels.unmarked_value_kernel, "sm_80")


@pytest.mark.parametrize("target", ["sm_89", "gfx1201"])
def test_a_marked_kernel_does_not_assemble_without_the_hook(target, kernels, capfd):
    with pytest.raises(Exception, match=r"ptxas|LLD|failed"):
        build(kernels.two_products_kernel, target, MARK=True)
    with mixed_sign_dots():
        build(kernels.two_products_kernel, target, MARK=True)
    capfd.readouterr()


def test_the_hook_before_is_called_and_comes_back(kernels):
    stages = []

    def before(*arguments):
        if not arguments:
            return "key", "hash"
        stages.append(sorted(arguments[1]))
        return None

    knobs.runtime.add_stages_inspection_hook = before
    try:
        with mixed_sign_dots():
            hook = knobs.runtime.add_stages_inspection_hook
            assert hook() == (f"key{MARKER}", f"hash{mixed_sign.DIGEST}")
            build(kernels.two_products_kernel, "sm_80", MARK=True)
        assert len(stages) == 1
        assert knobs.runtime.add_stages_inspection_hook is before
    finally:
        knobs.runtime.add_stages_inspection_hook = None


def test_a_hook_chained_on_top_stays_and_ours_becomes_inert(kernels, capfd):
    mixed_sign.install()
    ours = knobs.runtime.add_stages_inspection_hook

    def top(*arguments):
        return ours(*arguments)

    knobs.runtime.add_stages_inspection_hook = top
    try:
        mixed_sign.uninstall()
        assert knobs.runtime.add_stages_inspection_hook is top
        assert ours() == ("", "")
        with pytest.raises(Exception, match=r"ptxas|failed"):
            build(kernels.two_products_kernel, "sm_80", MARK=True)
        with mixed_sign_dots():
            build(kernels.two_products_kernel, "sm_80", MARK=True)
        assert knobs.runtime.add_stages_inspection_hook is top
    finally:
        knobs.runtime.add_stages_inspection_hook = None
    capfd.readouterr()


def test_other_threads_keep_their_cache_keys():
    keys = []
    with mixed_sign_dots():
        hook = knobs.runtime.add_stages_inspection_hook
        thread = threading.Thread(target=lambda: keys.append(hook()))
        thread.start()
        thread.join()
        keys.append(hook())
    assert keys == [("", ""), (MARKER, mixed_sign.DIGEST)]


def test_threads_share_one_installation():
    barrier = threading.Barrier(8)

    def use():
        barrier.wait()
        for _ in range(200):
            with mixed_sign_dots():
                assert knobs.runtime.add_stages_inspection_hook is not None

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError, match=r"install\(\) before"):
        mixed_sign.uninstall()


def test_the_key_of_the_cache_knows_the_rewriting_code(kernels):
    """The name of the marker is part of the source, on every Triton."""
    with mixed_sign_dots():
        compiled = build(kernels.two_products_kernel, "sm_80", MARK=True)
    assert MARKER in compiled.asm["ttir"]
    assert mixed_sign.DIGEST in MARKER


CHAIN = """define void @f(ptr %out) {
  %a = tail call { i32, i32 } asm "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 x", \
"=r,=r,0,1,r"(i32 0, i32 0, i32 %q)
  %b = extractvalue { i32, i32 } %a, 1
  %m = tail call i32 asm "mark $0, $1;", "=r,r"(i32 %b) #1
  store i32 %m, ptr %out
  ret void
}"""


def test_text_that_is_rewritten():
    found = rewrite_products(CHAIN, "mark")
    assert ".s32.u8.s8.s32 x" in found
    assert "store i32 %b, ptr" in found
    assert "mark" not in found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(i32 0, i32 0,", "(i32 0, i32 %q,", "from outside"),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite", "other", "unknown assembly"),
        ("extractvalue { i32, i32 } %a, 1", "add i32 %q, 1", "sum of products"),
    ],
)
def test_text_that_is_refused(old, new, message):
    assert old in CHAIN
    with pytest.raises(MixedSignError, match=message):
        rewrite_products(CHAIN.replace(old, new), "mark")


def test_an_element_follows_its_own_register():
    """The other element comes from outside, which does not matter to this one."""
    text = CHAIN.replace("(i32 0, i32 0,", "(i32 %q, i32 0,")
    assert ".s32.u8.s8.s32 x" in rewrite_products(text, "mark")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("first", [0, 100], ids=["small", "large"])
def test_products_on_the_gpu(kernels, first):
    """Also where sums of signed bytes would wrap: unsigned codes up to 255."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (64, 64)
    left = torch.randint(first, 256, shape, generator=generator, device="cuda", dtype=torch.uint8)
    right = torch.randint(-128, 128, shape, generator=generator, device="cuda", dtype=torch.int8)
    out = torch.empty(shape, dtype=torch.int32, device="cuda")
    signed = left.view(torch.int8)
    with mixed_sign_dots():
        kernels.two_products_kernel[(1,)](signed, right, out, REGISTER="=r,r", MARK=True)
    expected = left.double() @ right.mT.double() + 3 * (right.mT.double() @ signed.double())
    assert torch.equal(out.double(), expected)
