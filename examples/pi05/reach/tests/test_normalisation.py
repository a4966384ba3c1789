import numpy as np
import pytest
import torch
from reach.normalisation import QUANTILES, Statistics, denormalise, describe, normalise


@pytest.mark.parametrize("rows", [1, 2, 997])
def test_statistics_are_those_of_numpy(rows):
    values = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) * 5 + 2
    got = describe(values)
    data = values.double().numpy()
    np.testing.assert_allclose(got["mean"], data.mean(0), rtol=1e-6)
    np.testing.assert_allclose(got["std"], data.std(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(got["min"], data.min(0).astype(np.float32))
    np.testing.assert_array_equal(got["max"], data.max(0).astype(np.float32))
    for name, share in QUANTILES.items():
        np.testing.assert_allclose(got[name], np.quantile(data, share, axis=0), rtol=1e-5)
    assert got["count"].tolist() == [rows]


def test_quantiles_become_minus_one_and_one():
    statistics = {"q01": torch.tensor([-2.0, 3.0]), "q99": torch.tensor([6.0, 3.0])}
    values = torch.tensor([[-2.0, 3.0], [6.0, 3.0], [10.0, 3.0], [2.0, 3.0]])
    got = normalise(values, statistics)
    assert got[:, 0].tolist() == [-1.0, 1.0, 2.0, 0.0]  # outside the range is not clipped
    assert got[:, 1].tolist() == [-1.0] * 4  # a constant feature
    torch.testing.assert_close(denormalise(got, statistics), values)


def test_tensors_are_named_like_lerobots():
    part = describe(torch.randn(5, 2))
    names = Statistics(part, part).tensors()
    assert {"observation.state.q01", "action.q99", "action.count"} <= set(names)
    assert len(names) == 20
