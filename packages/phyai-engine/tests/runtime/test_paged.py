import pytest
import torch

from phyai.runtime.paged import PagedKVCache, PagedPlan


def test_plan_lists_rows_and_slots_of_each_request():
    slots = [torch.tensor([0, 2, 3]), torch.tensor([5])]
    plan = PagedPlan.from_slots([2, 1], slots, "cpu")
    assert plan.qo_indptr.tolist() == [0, 2, 3]
    assert plan.kv_indptr.tolist() == [0, 3, 4]
    assert plan.kv_indices.tolist() == [0, 2, 3, 5]
    assert plan.kv_last_page_len.tolist() == [1, 1]
    assert (plan.qo_lens, plan.kv_lens, plan.page_size) == ((2, 1), (3, 1), 1)
    assert plan.kv_indices.dtype == torch.int32


def test_plan_refuses_a_request_without_keys():
    with pytest.raises(ValueError, match="request 1 has no keys"):
        PagedPlan.from_slots(
            [1, 1], [torch.tensor([0]), torch.tensor([], dtype=torch.int64)], "cpu"
        )


def test_plan_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match="2 query lengths but 1 slot lists"):
        PagedPlan.from_slots([1, 1], [torch.tensor([0])], "cpu")


def test_cache_writes_only_the_asked_layer_and_slots():
    cache = PagedKVCache.allocate(
        layers=2, slots=5, kv_heads=1, head_dim=3, dtype=torch.float32, device="cpu"
    )
    cache.keys.fill_(-1)
    cache.values.fill_(-2)
    key, value = torch.randn(2, 1, 3), torch.randn(2, 1, 3)
    cache.write(1, 3, key, value)
    keys, values = cache.pages(1)
    assert torch.equal(keys[3:, 0], key)
    assert torch.equal(values[3:, 0], value)
    assert (keys[:3] == -1).all()
    assert (cache.pages(0)[0] == -1).all()
    assert (cache.pages(0)[1] == -2).all()
