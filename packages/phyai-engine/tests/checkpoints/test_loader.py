import pytest
import torch
from torch import nn

from phyai.checkpoints import CheckpointError, collect_slots, load_into
from phyai.checkpoints.slots import copy_slot


class Part(nn.Module):
    def __init__(self, name, *, alias=(), optional=False, missing=()):
        super().__init__()
        self.name, self.alias, self.optional = name, alias, optional
        self.lost = list(missing)
        self.weight = nn.Parameter(torch.full((2, 3), torch.nan), requires_grad=False)
        self.finished = 0

    def checkpoint_slots(self):
        yield copy_slot(self.name, self.weight, aliases=self.alias, optional=self.optional)

    def missing_parts(self):
        return self.lost

    def post_load(self):
        self.finished += 1


def readers(**tensors):
    return {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}


def test_loads_and_finishes_every_module():
    model = nn.ModuleList([Part("a"), Part("b")])
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    report = load_into(model, readers(a=a, b=b), source="x")
    assert torch.equal(model[0].weight, a)
    assert torch.equal(model[1].weight, b)
    assert [part.finished for part in model] == [1, 1]
    assert sorted(report.loaded) == ["a", "b"]


def test_casts_to_the_dtype_of_the_model():
    model = nn.ModuleList([Part("a")])
    load_into(model, readers(a=torch.ones(2, 3, dtype=torch.float64)), source="x")
    assert model[0].weight.dtype == torch.float32


def test_lists_everything_wrong_at_once_and_finishes_nothing():
    model = nn.ModuleList([Part("a"), Part("b"), Part("c", missing=["c.weight_scale"])])
    with pytest.raises(CheckpointError) as caught:
        load_into(
            model, readers(b=torch.zeros(3, 2), c=torch.zeros(2, 3), d=torch.zeros(1)), source="f"
        )
    text = str(caught.value)
    assert text.startswith("f does not fit the model")
    assert "2 missing:\n    a\n    c.weight_scale" in text
    assert "1 unexpected:\n    d" in text
    assert "b: the checkpoint has shape (3, 2), the model needs (2, 3)" in text
    assert [part.finished for part in model] == [0, 0, 0]


def test_long_lists_are_cut_with_a_count():
    with pytest.raises(CheckpointError, match=r"15 unexpected(.|\n)*and 3 more"):
        load_into(
            nn.Module(), readers(**{f"t{i:02}": torch.zeros(1) for i in range(15)}), source="f"
        )


def test_an_optional_tensor_may_be_absent():
    load_into(nn.ModuleList([Part("a", optional=True)]), {}, source="f")


@pytest.mark.parametrize("names", [("a",), ("head",), ("a", "head")])
def test_a_tied_tensor_is_read_from_its_own_name_first(names):
    model = nn.ModuleList([Part("a", alias=("head",))])
    values = {"a": torch.full((2, 3), 1.0), "head": torch.full((2, 3), 2.0)}
    report = load_into(model, readers(**{n: values[n] for n in names}), source="f")
    assert torch.equal(model[0].weight, values[names[0]])
    assert report.tied == list(names[1:])


def test_a_tied_tensor_absent_under_both_names_is_missing():
    with pytest.raises(CheckpointError, match="1 missing:\n    a"):
        load_into(nn.ModuleList([Part("a", alias=("head",))]), {}, source="f")


def test_two_modules_cannot_claim_one_tensor():
    with pytest.raises(CheckpointError, match="two modules of the model claim the tensor a"):
        collect_slots(nn.ModuleList([Part("a"), Part("a")]))
