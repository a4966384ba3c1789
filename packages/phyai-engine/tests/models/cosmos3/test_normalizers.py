"""Action units: every kind against its formula, and back."""

import numpy as np
import pytest

from phyai.models.cosmos3.normalizers import ActionNormalizer, Normalization
from phyai.processing.errors import ProcessingError

STATISTICS = {
    "min": [-2.0, 0.0, 5.0],
    "max": [4.0, 1.0, 5.0],
    "q01": [-1.0, 0.25, 4.0],
    "q99": [3.0, 0.75, 6.0],
    "mean": [0.5, 0.5, 5.0],
    "std": [2.0, 0.125, 0.0],
    "global_raw": {"q01": [-8.0, -1.0, 0.0], "q99": [8.0, 1.0, 2.0]},
}
RANGES = {
    "minmax": ([-2, 0, 4], [4, 1, 6]),
    "quantile": ([-1, 0.25, 4], [3, 0.75, 6]),
    "quantile_rot": ([-8, -1, 0], [8, 1, 2]),
    "meanstd": ([-1.5, 0.375, 4], [2.5, 0.625, 6]),
}


@pytest.mark.parametrize("kind", [*Normalization])
def test_formula_and_inverse(kind):
    normalizer = ActionNormalizer.from_statistics(kind, STATISTICS)
    actions = np.random.default_rng(0).normal(1, 3, (7, 5, 3))
    plain = str(kind).removeprefix("asinh_")
    low, high = (np.array(ends, float) for ends in RANGES[plain])
    expected = 2 * (actions - low) / (high - low) - 1
    if str(kind).startswith("asinh"):
        expected = np.arcsinh(expected)
    found = normalizer.normalize(actions)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(normalizer.restore(found), actions, rtol=1e-5, atol=1e-5)
    assert normalizer.width == 3


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("zscore", {}, "allowed: minmax, quantile"),
        ("minmax", {"max": None}, "must be a vector of finite numbers"),
        ("minmax", {"max": [1.0, 2.0]}, "have 3 and 2 columns"),
        ("minmax", {"max": [-3.0, 1.0, 5.0]}, "reversed in column 0"),
        ("meanstd", {"std": [1.0, -1.0, 1.0]}, "reversed in column 1"),
        ("meanstd", {"mean": [np.inf, 0, 0]}, "'mean' of meanstd must be"),
        ("meanstd", {"mean": "abc"}, "'mean' of meanstd must be"),
        ("quantile", {"q99": [[1.0]]}, "must be a vector"),
        ("quantile_rot", {"global_raw": [1]}, "reads 'global_raw'"),
        ("quantile_rot", {"global_raw": {"q01": [1.0]}}, "'q99' is missing, found: q01"),
    ],
)
def test_bad_statistics_are_named(kind, change, message):
    with pytest.raises(ProcessingError, match=message):
        ActionNormalizer.from_statistics(kind, STATISTICS | change)
