import logging

import pytest
import torch

from phyai.processing.errors import ProcessingError
from phyai.processing.tokenizer import FILE_NAMES, find_tokenizer, load_tokenizer


@pytest.fixture(params=["json", "sentencepiece"])
def tokenizer(request, tmp_path, build):
    if request.param == "json":
        return load_tokenizer(build.write_tokenizer(tmp_path / "tokenizer.json"))
    return load_tokenizer(build.write_sentencepiece(tmp_path / "paligemma_tokenizer.model"))


def expected_bos(tokenizer):
    return 5 if tokenizer.source.suffix == ".json" else 2


def test_one_bos_in_front_and_no_eos(tokenizer):
    ids = tokenizer.encode(["pick up the red block", "\n"])
    assert ids[0] == tokenizer.bos_id == expected_bos(tokenizer)
    assert ids.count(tokenizer.bos_id) == 1
    assert 1 not in ids
    assert len(ids) > 5  # the file's own truncation is off


def test_pieces_concatenate(tokenizer):
    apart = tokenizer.encode(["pick", "", "\n"])
    assert apart[1:] == tokenizer.encode_piece("pick") + tokenizer.encode_piece("\n")


def test_bos_spelled_in_the_task_stays_text(tokenizer):
    ids = tokenizer.encode(["<bos>pick<eos>"])
    assert ids.count(tokenizer.bos_id) == 1
    assert 1 not in ids


def test_trailing_space_is_kept(tokenizer):
    assert tokenizer.encode(["Action: "]) != tokenizer.encode(["Action:"])


def test_batch_is_padded_on_the_right_with_zero(tokenizer):
    tokens, mask = tokenizer.encode_batch([("pick", "\n"), ("place the cup",)], 40)
    assert tokens.shape == mask.shape == (2, 40)
    assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
    for row, pieces in enumerate([("pick", "\n"), ("place the cup",)]):
        ids = tokenizer.encode(pieces)
        assert tokens[row, : len(ids)].tolist() == ids
        assert (tokens[row, len(ids) :] == 0).all()
        assert mask[row].tolist() == [True] * len(ids) + [False] * (40 - len(ids))


@pytest.mark.parametrize("slots", [1, 7, 200])
def test_truncation_keeps_the_front_and_warns(tokenizer, slots, caplog):
    prompt = ("Task: pick up, State: " + "-1 255 " * 60,)
    ids = tokenizer.encode(prompt)
    with caplog.at_level(logging.WARNING):
        tokens, mask = tokenizer.encode_batch([prompt], slots)
    assert tokens[0].tolist() == ids[:slots]
    assert mask.all()
    assert f"prompt of {len(ids)} tokens truncated to the {slots} slots" in caplog.text


def test_a_prompt_that_just_fits_causes_no_warning(tokenizer, caplog):
    ids = tokenizer.encode(["pick"])
    _, mask = tokenizer.encode_batch([("pick",)], len(ids))
    assert mask.all()
    assert not caplog.text


def test_character_ids_are_those_of_the_file(tmp_path, build):
    tokenizer = load_tokenizer(build.write_tokenizer(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(["a\nb"]) == [5, *(6 + ord("a") - 32,), 6 + 95, 6 + ord("b") - 32]
    assert tokenizer.vocab_size == 6 + 98


@pytest.mark.parametrize("kind", ["json", "sentencepiece"])
def test_bos_defaults_to_two(kind, tmp_path, build):
    if kind == "json":
        path = build.write_tokenizer(tmp_path / "tokenizer.json", bos="<start>")
    else:
        path = build.write_sentencepiece(tmp_path / "tokenizer.model", bos_id=-1, unk_id=2)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode(["a"])[0] == 2


def test_search_order_prefers_the_checkpoints_root(tmp_path, build):
    places = [tmp_path / name for name in FILE_NAMES] + [tmp_path / "tokenizer" / FILE_NAMES[0]]
    for place in reversed(places):
        place.parent.mkdir(exist_ok=True)
        place.touch()
        assert find_tokenizer(tmp_path) == place


@pytest.mark.parametrize("folder", ["tokenizer", "assets"])
def test_subfolders_are_searched(folder, tmp_path):
    place = tmp_path / folder / "paligemma_tokenizer.model"
    place.parent.mkdir()
    place.touch()
    assert find_tokenizer(tmp_path, named="google/paligemma-3b-pt-224") == place


def test_a_named_path_goes_first(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.model").touch()
    assert find_tokenizer(tmp_path, named="mine") == tmp_path / "mine" / "tokenizer.model"
    absolute = str(tmp_path / "mine" / "tokenizer.model")
    assert find_tokenizer(tmp_path, named=absolute) == tmp_path / "mine" / "tokenizer.model"
    assert find_tokenizer(tmp_path, named="/no/such/folder") == tmp_path / "tokenizer.json"


@pytest.mark.parametrize("target", ["folder", "file"])
def test_an_override_is_the_only_place(target, tmp_path):
    (tmp_path / "tokenizer.json").touch()
    other = tmp_path / "other"
    other.mkdir()
    override = other if target == "folder" else other / "tokenizer.json"
    with pytest.raises(ProcessingError, match=r"other/tokenizer.json") as caught:
        find_tokenizer(tmp_path, override=override)
    assert f"\n  {tmp_path / 'tokenizer.json'}" not in str(caught.value)
    (other / "tokenizer.json").touch()
    assert find_tokenizer(tmp_path, override=override) == other / "tokenizer.json"


def test_a_missing_tokenizer_names_the_places_and_the_way_out(tmp_path):
    with pytest.raises(ProcessingError) as caught:
        find_tokenizer(tmp_path, named="google/paligemma-3b-pt-224")
    message = str(caught.value)
    for folder in (tmp_path, tmp_path / "tokenizer", tmp_path / "assets"):
        for name in FILE_NAMES:
            assert str(folder / name) in message
    assert "'google/paligemma-3b-pt-224', which is not fetched" in message
    assert "Copy tokenizer.json" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\x00garbage"])
def test_a_broken_file_is_named(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ProcessingError, match=rf"{name} can not be read as a tokenizer"):
        load_tokenizer(path)
