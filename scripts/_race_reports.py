"""What racecheck reports, and which reports are about Triton's hand-over to groups of warps.

A kernel that is split among groups of warps has a byte in shared memory for each warp that tells it
what to run. Triton writes and reads these bytes between barriers of all warps. Where a group has
barriers of its own too, for a sum or a maximum, racecheck loses count of the others and reports a
race on the bytes; it does so in ``_warp_groups``, whose kernel adds numbers and nothing else, and
not without the sums. Such a report names the first line of a kernel and the one that splits it, and
no other line.
"""

import ast
import re
from pathlib import Path

_ACCESS = re.compile(r"\b(?:Read|Write) access at (\S+?)\+0x[0-9a-f]+ in (\S+?):(\d+)")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
_REPORT = re.compile(r"\bRace reported between\b")
_SPLIT = "warp_specialize"


def hand_over_lines(source: str, kernel: str) -> set[int]:
    """Return the lines of a kernel that start it and split it among groups of warps."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name != kernel:
            continue
        lines = set[int]()
        for statement in node.body:
            for part in ast.walk(statement):
                if isinstance(part, ast.Attribute) and part.attr == _SPLIT:
                    lines |= {statement.lineno, part.lineno}
        return lines | {node.lineno} if lines else set()
    return set()


def is_hand_over(text: str, folders: tuple[Path, ...]) -> bool:
    """Return whether races were reported, all of them of Triton's hand-over.

    Args:
        text: What racecheck said.
        folders: Where the sources of kernels are.
    """
    summary = _SUMMARY.search(text)
    reports = text.split("Race reported between")[1:]
    if summary is None or not reports or int(summary[1]) != len(_REPORT.findall(text)):
        return False
    for report in reports:
        accesses = _ACCESS.findall(report)
        if len(accesses) != len(re.findall(r"\baccess at\b", report)):
            return False
        for kernel, file, line in accesses:
            paths = [folder / Path(file).name for folder in folders]
            found = [path for path in paths if path.is_file()]
            if len(found) != 1 or int(line) not in hand_over_lines(found[0].read_text(), kernel):
                return False
    return True
