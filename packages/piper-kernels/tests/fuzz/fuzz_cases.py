"""Cases of the weight-format fuzz: what varies, how a dense matrix is made, how one replays.

``PIPER_FUZZ_CASES`` is the number of cases over all fuzz tests (quick default 400).
``PIPER_FUZZ_SEED`` draws other cases than the fixed ones.
``PIPER_FUZZ_REPLAY`` holds the JSON of one case, as the repro line of a failure prints it.
"""

import dataclasses
import json
import math
import os

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

QUICK_CASES = 400
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
GROUPS = (16, 64, 256)
MAX_FEATURES = 1024
ROWS = (1, 2, 3, 5, 7, 16, 17, 31, 32, 33, 127, 128, 129, 131)
LAYOUTS = (
    "contiguous",
    "transposed",
    "sliced columns",
    "sliced rows",
    "offset",
    "one row repeated",
)
VALUES = (
    "normal",
    "zeros",
    "negative zeros",
    "integers",
    "huge",
    "tiny",
    "denormal rows",
    "outlier column",
    "outlier row",
    "sparse",
    "constant",
    "mixed rows",
)
LARGEST = {torch.float16: 6e4, torch.bfloat16: 1e37, torch.float32: 1e37}


@dataclasses.dataclass(frozen=True)
class Case:
    """One fuzz case: everything that its tensors are made from."""

    operation: str
    rows: int
    features: int
    group: int
    dtype: str
    layout: str
    values: str
    option: int
    seed: int

    @property
    def torch_dtype(self):
        return DTYPES[self.dtype]

    def generator(self):
        return torch.Generator().manual_seed(self.seed)

    def dense(self):
        """Return the weight ``[rows, features]`` in its dtype, with the layout of the case."""
        return lay_out(self.matrix(self.rows, self.generator()), self.layout)

    def matrix(self, rows, generator, values=None):
        return make_values(values or self.values, rows, self.features, self.torch_dtype, generator)


def cases(operations, groups=GROUPS):
    """Return the strategy of all cases of a format; group 0 stands for no rotation."""

    def with_group(group):
        step = group or 16
        return st.builds(
            Case,
            operation=st.sampled_from(operations),
            rows=st.sampled_from(ROWS),
            features=st.integers(1, min(20, MAX_FEATURES // step)).map(step.__mul__),
            group=st.just(group),
            dtype=st.sampled_from(sorted(DTYPES)),
            layout=st.sampled_from(LAYOUTS),
            values=st.sampled_from(VALUES),
            option=st.integers(0, 255),
            seed=st.integers(0, 2**32 - 1),
        )

    return st.sampled_from(groups).flatmap(with_group)


def make_values(kind, rows, features, dtype, generator):
    values = torch.randn(rows, features, generator=generator)
    largest = LARGEST[dtype]
    smallest = torch.finfo(dtype).smallest_normal
    if kind == "mixed rows":
        kinds = VALUES[: VALUES.index("mixed rows")]
        parts = [make_values(kinds[row % len(kinds)], 1, features, dtype, generator)
                 for row in range(rows)]  # fmt: skip
        return torch.cat(parts)
    if kind == "zeros":
        values.zero_()
    elif kind == "negative zeros":
        values.zero_().neg_()
    elif kind == "integers":
        values.mul_(4).round_()
    elif kind == "huge":
        values.clamp_(-3, 3).mul_(largest / 3)
    elif kind == "tiny":
        values.mul_(smallest * 8)
    elif kind == "denormal rows":
        values.clamp_(-1, 1)[::2].mul_(smallest / 4)
    elif kind == "outlier column":
        values[:, features // 3].mul_(200)
    elif kind == "outlier row":
        values[rows // 2].mul_(200)
    elif kind == "sparse":
        values.mul_(torch.rand(values.shape, generator=generator) < 0.02)
    elif kind == "constant":
        values.fill_(-0.7)
    return values.to(dtype)


def lay_out(matrix, layout):
    """Return a tensor with the values of ``matrix`` and other strides."""
    rows, features = matrix.shape
    if layout == "transposed":
        return matrix.t().contiguous().t()
    if layout == "sliced columns":
        store = torch.full((rows, 2 * features), math.nan, dtype=matrix.dtype)
        store[:, ::2] = matrix
        return store[:, ::2]
    if layout == "sliced rows":
        store = torch.full((3 * rows, features), math.nan, dtype=matrix.dtype)
        store[1::3] = matrix
        return store[1::3]
    if layout == "offset":
        store = torch.full((rows * features + 3,), math.nan, dtype=matrix.dtype)
        store[3:] = matrix.flatten()
        return store[3:].view(rows, features)
    if layout == "one row repeated":
        return matrix[:1].expand(rows, features)
    return matrix


def fuzz(share):
    """Return the Hypothesis settings of a test that runs ``share`` of all cases."""
    total = int(os.environ.get("PIPER_FUZZ_CASES", QUICK_CASES))
    chosen = os.environ.get("PIPER_FUZZ_SEED")

    def decorate(test):
        configured = settings(
            max_examples=1 if replayed() else max(1, math.ceil(total * share)),
            deadline=None,
            database=None,
            derandomize=chosen is None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(test)
        return configured if chosen is None else seed(int(chosen))(configured)

    return decorate


def run_case(operations, case, test_file):
    """Run the check of a case; a failure carries the line that repeats it."""
    case = replayed() or case
    try:
        operations[case.operation](case)
    except Exception as error:
        described = json.dumps(dataclasses.asdict(case))
        error.add_note(f"repro: PIPER_FUZZ_REPLAY='{described}' pytest {test_file}")
        raise


def replayed():
    """Return the case of ``PIPER_FUZZ_REPLAY``, or ``None``."""
    text = os.environ.get("PIPER_FUZZ_REPLAY")
    return None if text is None else Case(**json.loads(text))
