import numpy as np
import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.normalize import (
    STATISTICS,
    FeatureStats,
    NormMode,
    NormSystem,
    build_normalizer,
    identity,
)

EPS = {NormSystem.LEROBOT: 1e-8, NormSystem.OPENPI: 1e-6}
MODES = list(STATISTICS)


def make(mode, system, **statistics):
    values = {name: np.asarray(column, np.float64) for name, column in statistics.items()}
    stats = FeatureStats(values, "stats.json")
    return build_normalizer("action", mode, stats, system=system, eps=EPS[system], searched="here")


@pytest.mark.parametrize("system", list(NormSystem))
@pytest.mark.parametrize("mode", MODES)
def test_forward_and_inverse_follow_the_hand_formula(mode, system):
    first, second = ([-2.0, 0.5, 3.0], [1.5, 0.75, 9.0])
    normalizer = make(mode, system, **dict(zip(STATISTICS[mode], (first, second), strict=True)))
    x = np.array([[0.1, -4.0, 30.0], [-2.0, 0.5, 3.0]])
    eps, dtype = EPS[system], np.float32 if system is NormSystem.LEROBOT else np.float64
    for row in range(2):
        for column in range(3):
            a, b, value = first[column], second[column], x[row, column]
            if mode is NormMode.MEAN_STD:
                forward = (value - a) / (b + eps)
                inverse = value * (b + (eps if system is NormSystem.OPENPI else 0)) + a
            else:
                width = b - a + (eps if system is NormSystem.OPENPI else 0)
                forward = 2 * (value - a) / width - 1
                inverse = (value + 1) / 2 * width + a
            assert normalizer.forward(x)[row, column] == pytest.approx(forward, rel=1e-6, abs=1e-6)
            assert normalizer.inverse(x)[row, column] == pytest.approx(inverse, rel=1e-6, abs=1e-6)
    assert normalizer.forward(x).dtype == normalizer.inverse(x).dtype == dtype


@pytest.mark.parametrize("system", list(NormSystem))
@pytest.mark.parametrize("mode", MODES)
def test_round_trip(mode, system, build):
    stats = FeatureStats(build.state_stats(7), "stats.json")
    normalizer = build_normalizer(
        "state", mode, stats, system=system, eps=EPS[system], searched="here"
    )
    x = np.random.default_rng(3).normal(size=(5, 11, 7)) * 4
    assert np.allclose(normalizer.inverse(normalizer.forward(x)), x, atol=5e-6)


def test_nothing_is_clipped():
    normalizer = make(NormMode.QUANTILES, NormSystem.OPENPI, q01=[0.0], q99=[1.0])
    assert normalizer.forward(np.array([5.0]))[0] == pytest.approx(9, abs=1e-4)


@pytest.mark.parametrize("mode", [NormMode.QUANTILES, NormMode.QUANTILE10, NormMode.MIN_MAX])
def test_zero_width_of_lerobot_uses_eps_only_there(mode):
    names = STATISTICS[mode]
    normalizer = make(mode, NormSystem.LEROBOT, **{names[0]: [0.5, 0.0], names[1]: [0.5, 2.0]})
    x = np.array([0.5, 0.5], np.float32)
    assert normalizer.forward(x).tolist() == [-1.0, -0.5]
    assert normalizer.forward(np.array([1.0, 0.0]))[0] == pytest.approx(2 * 0.5 / 1e-8, rel=1e-5)
    assert np.allclose(normalizer.inverse(normalizer.forward(x)), x, atol=1e-6)
    assert normalizer.inverse(np.array([0.3, 0.3]))[0] == pytest.approx(0.5, abs=1e-6)


def test_zero_width_of_openpi_always_adds_eps():
    normalizer = make(NormMode.QUANTILES, NormSystem.OPENPI, q01=[0.5, 0.0], q99=[0.5, 2.0])
    forward = normalizer.forward(np.array([0.5, 1.0]))
    assert forward[0] == -1.0
    assert forward[1] == 2 / (2 + 1e-6) - 1
    assert np.allclose(normalizer.inverse(forward), [0.5, 1.0], atol=1e-12)


def test_zero_std():
    openpi = make(NormMode.MEAN_STD, NormSystem.OPENPI, mean=[2.0], std=[0.0])
    assert openpi.forward(np.array([2.0]))[0] == 0
    assert openpi.inverse(openpi.forward(np.array([3.0])))[0] == pytest.approx(3.0)
    lerobot = make(NormMode.MEAN_STD, NormSystem.LEROBOT, mean=[2.0], std=[0.0])
    assert lerobot.inverse(np.array([7.0]))[0] == 2.0


def test_columns_beyond_the_statistics_pass_through_backwards_only():
    normalizer = make(NormMode.QUANTILES, NormSystem.OPENPI, q01=[0.0, 10.0], q99=[2.0, 30.0])
    y = np.full((3, 2, 5), 0.25)
    result = normalizer.inverse(y)
    assert np.allclose(result[..., :2], [1.25, 22.5], atol=1e-5)
    assert (result[..., 2:] == 0.25).all()
    assert (y == 0.25).all()
    with pytest.raises(ProcessingError, match=r"has 5 columns but its statistics cover 2 \(stats"):
        normalizer.forward(y)


def test_wider_statistics_are_cut_to_the_values():
    normalizer = make(NormMode.MIN_MAX, NormSystem.LEROBOT, min=[0, 1, 2], max=[2, 3, 4])
    assert normalizer.forward(np.array([[1.0, 3.0]])).tolist() == [[0.0, 1.0]]
    assert normalizer.inverse(np.array([[0.0, 1.0]])).tolist() == [[1.0, 3.0]]


def test_identity_changes_nothing_and_copies_backwards():
    normalizer = identity("action", NormSystem.OPENPI, "test")
    y = np.array([1.0, np.pi])
    assert np.array_equal(normalizer.forward(y), y)
    assert np.array_equal(normalizer.inverse(y), y)
    assert normalizer.inverse(y) is not y


def test_missing_statistics_are_refused_with_the_ways_out():
    arguments = {"system": NormSystem.LEROBOT, "eps": 1e-8, "searched": "a.json, b.json"}
    with pytest.raises(ProcessingError) as caught:
        build_normalizer("state", NormMode.QUANTILES, None, **arguments)
    for part in ("state", "QUANTILES", "a.json, b.json", "norm_stats.json", "'raw'", "identity"):
        assert part in str(caught.value)
    allowed = build_normalizer(
        "state", NormMode.QUANTILES, None, allow_identity_norm=True, **arguments
    )
    assert allowed.mode is NormMode.IDENTITY
    declared = build_normalizer("state", NormMode.IDENTITY, None, **arguments)
    assert declared.mode is NormMode.IDENTITY


def test_statistics_of_another_mode_are_refused_with_what_was_found():
    with pytest.raises(ProcessingError, match=r"needs q01 and q99, missing q01 and q99; found: me"):
        make(NormMode.QUANTILES, NormSystem.LEROBOT, mean=[0.0], std=[1.0])


@pytest.mark.parametrize(
    ("mode", "statistics", "message"),
    [
        (NormMode.MEAN_STD, {"mean": [0.0, np.inf], "std": [1, 1]}, "mean is inf in column 1"),
        (NormMode.MEAN_STD, {"mean": [0.0], "std": [np.inf]}, "std is inf in column 0"),
        (NormMode.MEAN_STD, {"mean": [np.nan], "std": [1.0]}, "mean is nan"),
        (NormMode.MEAN_STD, {"mean": [0, 0], "std": [1, -0.5]}, "std -0.5 is negative in column 1"),
        (NormMode.QUANTILES, {"q01": [0, 3.0], "q99": [1, 2.0]}, "q01 3 is above q99 2 in column"),
        (NormMode.QUANTILES, {"q01": [-np.inf], "q99": [1.0]}, "q01 is -inf"),
        (NormMode.QUANTILE10, {"q10": [1.0], "q90": [0.0]}, "q10 1 is above q90 0"),
        (NormMode.MIN_MAX, {"min": [1.0], "max": [np.nan]}, "max is nan"),
        (NormMode.MIN_MAX, {"min": [1.0, 2], "max": [2.0]}, "vectors of one length"),
        (NormMode.MIN_MAX, {"min": [], "max": []}, "vectors of one length"),
        (NormMode.MIN_MAX, {"min": [[1.0]], "max": [[2.0]]}, "vectors of one length"),
    ],
)
def test_degenerate_statistics_are_refused_even_when_identity_is_allowed(mode, statistics, message):
    values = {name: np.asarray(column, np.float64) for name, column in statistics.items()}
    with pytest.raises(ProcessingError, match=message):
        build_normalizer(
            "action",
            mode,
            FeatureStats(values, "stats.json"),
            system=NormSystem.LEROBOT,
            eps=1e-8,
            searched="here",
            allow_identity_norm=True,
        )


@pytest.mark.parametrize("system", list(NormSystem))
@pytest.mark.parametrize("mode", MODES)
def test_restore_is_the_way_back_of_inverse(mode, system):
    first, second = [-2.0, 0.5, 3.0], [1.5, 0.75, 9.0]
    if mode is NormMode.MEAN_STD:
        second = [1e-7, 0.75, 9.0]  # the epsilon must not matter
    normalizer = make(mode, system, **dict(zip(STATISTICS[mode], (first, second), strict=True)))
    model = np.random.default_rng(0).normal(size=(7, 5))[:, ::-1]
    columns = slice(1, None) if system is NormSystem.LEROBOT else slice(None)
    found = normalizer.restore(normalizer.inverse(model))
    np.testing.assert_allclose(found[:, columns], model[:, columns], atol=1e-5)
    assert found.dtype == normalizer.inverse(model).dtype


@pytest.mark.parametrize("system", list(NormSystem))
@pytest.mark.parametrize("mode", MODES)
def test_restore_knows_what_a_column_without_spread_was_trained_with(mode, system):
    second = 0.0 if mode is NormMode.MEAN_STD else 0.3
    normalizer = make(mode, system, **dict(zip(STATISTICS[mode], ([0.3], [second]), strict=True)))
    found = normalizer.restore(np.array([[0.3], [0.3 + 1e-7], [5.0]]))
    np.testing.assert_allclose(found, 0.0 if mode is NormMode.MEAN_STD else -1.0)


def test_restore_of_identity_copies():
    values = np.zeros((2, 3))
    assert identity("action", NormSystem.OPENPI, "none").restore(values) is not values
