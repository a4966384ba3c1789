"""Rewrites marked INT8 products in LLVM IR so that their left operand is unsigned.

Triton has one 8-bit integer type, so its products are signed on both sides although the matrix
instructions take an unsigned left operand as well. A kernel bit-casts unsigned codes, multiplies
them as signed and passes the sums through a marker: inline assembly that no assembler knows.
:func:`rewrite_products` follows the accumulator of each marker back through the function, changes
the sign of the left operand of every product that it meets and removes the marker.
"""

import re
from collections.abc import Iterator, Mapping

_FUNCTION = re.compile(r"^define .*?^\}", re.MULTILINE | re.DOTALL)
_VALUE = r"%[\w.$-]+|%\"[^\"]+\""
_DEFINITION = re.compile(rf"^\s*({_VALUE}) = (.*)$")
_NAME = re.compile(_VALUE)
_ASSEMBLY = re.compile(r'\basm (?:sideeffect )?"((?:[^"\\]|\\.)*)", "([^"]*)"\((.*)\)')
_INDEXED = re.compile(
    r"(extractvalue|extractelement) .*? (%[\w.$-]+|zeroinitializer|undef|poison), (?:i\d+ )?(\d+)"
)
_INSERTED = re.compile(
    r"insert(?:value|element) .*? (%[\w.$-]+|zeroinitializer|undef|poison), "
    r"\S+ (%[\w.$-]+|-?\d+|undef|poison), (?:i\d+ )?(\d+)"
)
_PHI_INPUT = re.compile(r"\[ ([^,\]]+), %[^\]]+\]")
_SELECT = re.compile(r"select i1 [^,]+, (?:<.*?>|\{.*?\}|\w+) ([^,]+), (?:<.*?>|\{.*?\}|\w+) (\S+)")

_NVIDIA_PRODUCTS = (
    ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", ".s32.u8.s8.s32"),
    ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", ".s32.u8.s8.s32"),
    ("mma.sync.aligned.m16n8k16.row.col.satfinite.s32.s8.s8.s32", ".s32.u8.s8.s32"),
    ("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32", ".s32.u8.s8.s32"),
)
_WARPGROUP_PRODUCT = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32)\.s8\.s8")
_PASSES_THROUGH = ("// wait for regs", "wgmma.wait_group")
_AMD_PRODUCT = re.compile(
    r"@llvm\.amdgcn\.wmma\.i32\.16x16x16\.iu8\.[\w.]+\((i1 \w+), (.+?), (i1 \w+), (.+?), "
    r"<\d+ x i32> (%[\w.$-]+|[^%]+), (i1 \w+)\)"
)


class MixedSignError(RuntimeError):
    """A marker does not follow products that start from constants, or cannot be understood."""


def rewrite_products(llvm_ir: str, marker: str, *, left_is_second: bool = False) -> str:
    """Return LLVM IR whose marked products have an unsigned left operand, without markers.

    Args:
        llvm_ir: A module in text form.
        marker: Name of the marker instruction, followed by two operands.
        left_is_second: Whether AMD products take the left operand second, as they do where
            Triton computes the transposed product.

    Raises:
        MixedSignError: An accumulator has a part that no product and no constant made.
    """
    if marker not in llvm_ir:
        return llvm_ir
    result = _FUNCTION.sub(
        lambda match: _rewrite_function(match.group(), marker, left_is_second), llvm_ir
    )
    if marker in result:
        raise MixedSignError(f"the marker {marker} is left outside of the functions it is used in")
    return result


def _rewrite_function(text: str, marker: str, left_is_second: bool) -> str:
    if marker not in text:
        return text
    lines = text.split("\n")
    definitions = {}
    for number, line in enumerate(lines):
        if match := _DEFINITION.match(line):
            definitions[match.group(1)] = number
    replaced, products = {}, set()
    for name, number in list(definitions.items()):
        assembly = _ASSEMBLY.search(lines[number])
        if assembly is None or not assembly.group(1).startswith(marker):
            continue
        operands = _operands(assembly.group(3))
        if len(operands) != 1:
            raise MixedSignError(f"the marker takes one operand: {lines[number].strip()}")
        replaced[name] = operands[0]
        products |= _products_of(operands[0], definitions, lines)
        lines[number] = ""
    for number in products:
        lines[number] = _with_unsigned_left(lines[number], left_is_second)
    return "\n".join(_substitute(line, replaced) for line in lines)


def _products_of(value: str, definitions: Mapping[str, int], lines: list[str]) -> set[int]:
    """Return the lines of the products that an accumulator element is the sum of."""
    products, seen = set(), set()
    waiting: list[tuple[str, int | None]] = [(value, None)]
    while waiting:
        item = waiting.pop()
        if item in seen or "%" not in item[0]:  # a constant
            continue
        seen.add(item)
        name, element = item
        number = definitions.get(name)
        if number is None:
            raise MixedSignError(
                f"a marked accumulator must start from constants, found {name} from outside"
            )
        line = lines[number]
        if _is_product(line):
            products.add(number)
        waiting += _sources(line, element)
    if not products:
        raise MixedSignError(f"no INT8 matrix product leads to the marked value {value}")
    return products


def _is_product(line: str) -> bool:
    if _AMD_PRODUCT.search(line) or _WARPGROUP_PRODUCT.search(line):
        return True
    return any(f"{name} " in line for name, _ in _NVIDIA_PRODUCTS)


def _sources(line: str, element: int | None) -> Iterator[tuple[str, int | None]]:
    """Yield what a value, or one element of it, is accumulated from."""
    if match := _AMD_PRODUCT.search(line):
        yield match.group(5), element
    elif match := _ASSEMBLY.search(line):
        known = _is_product(line) or match.group(1).startswith(_PASSES_THROUGH)
        if not known:
            raise MixedSignError(f"unknown assembly makes a marked accumulator: {line.strip()}")
        yield from _tied_operands(match.group(2), _operands(match.group(3)), element)
    elif match := _INDEXED.search(line):
        yield match.group(2), int(match.group(3))
    elif match := _INSERTED.search(line):
        here = int(match.group(3))
        if element != here:
            yield match.group(1), element
        if element in (None, here):
            yield match.group(2), None
    elif " phi " in line:
        for source in _PHI_INPUT.findall(line):
            yield source.strip(), element
    elif match := _SELECT.search(line):
        yield match.group(1).strip(), element
        yield match.group(2).strip().rstrip(","), element
    else:
        raise MixedSignError(
            f"a marked accumulator must be a sum of products that starts from constants, found: "
            f"{line.strip()}"
        )


def _tied_operands(
    constraints: str, operands: list[str], element: int | None
) -> Iterator[tuple[str, int | None]]:
    """Yield the operand that shares its register with output ``element``, or all that share one."""
    entries = [entry for entry in constraints.split(",") if not entry.startswith("~")]
    inputs = [entry for entry in entries if not entry.startswith("=")]
    for entry, operand in zip(inputs, operands, strict=True):
        if entry.isdigit() and element in (None, int(entry)):
            yield operand, None


def _operands(text: str) -> list[str]:
    """Split the arguments of a call and drop their types."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.split()[-1] for part in parts if part.strip()]


def _with_unsigned_left(line: str, left_is_second: bool) -> str:
    if match := _AMD_PRODUCT.search(line):
        start, end = match.span(3 if left_is_second else 1)
        return f"{line[:start]}i1 false{line[end:]}"
    for name, unsigned in _NVIDIA_PRODUCTS:
        line = line.replace(f"{name} ", f"{name.removesuffix('.s32.s8.s8.s32')}{unsigned} ")
    return _WARPGROUP_PRODUCT.sub(r"\1.u8.s8", line)


def _substitute(line: str, replaced: Mapping[str, str]) -> str:
    return _NAME.sub(lambda match: replaced.get(match.group(), match.group()), line)
