import json

import pytest
from reach.instructions import COLOUR_NAMES, TEMPLATES, instruction
from reach.tokenizer import MAX_LENGTH, SPECIALS, build_tokenizer, save_tokenizer
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def test_special_ids_are_those_of_paligemma(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == [0, 1, 2, 3]
    assert tokenizer.get_vocab_size() % 64 == 0
    assert tokenizer.get_vocab_size() <= 512


def test_encoding_is_bos_and_tokens_without_eos(tokenizer):
    text = "Task: Reach the red disc, State: 7 -1 255 128;\nAction: "
    tokens = tokenizer.encode(text).tokens
    words = [
        "<bos>",
        "task",
        ":",
        "reach",
        "the",
        "red",
        "disc",
        ",",
        "state",
        ":",
        "7",
        "-1",
        "255",
        "128",
        ";",
        "\n",
        "action",
        ":",
    ]
    assert tokens == words


def test_no_word_of_the_task_is_unknown(tokenizer):
    for template in range(len(TEMPLATES)):
        for colour in range(len(COLOUR_NAMES)):
            ids = tokenizer.encode(instruction(template, colour)).ids
            assert 3 not in ids
            assert len(ids) + 14 <= MAX_LENGTH


def test_numbers_are_single_consecutive_tokens(tokenizer):
    ids = [tokenizer.encode(str(n), add_special_tokens=False).ids for n in range(-1, 256)]
    assert all(len(one) == 1 for one in ids)
    assert [one[0] for one in ids] == list(range(ids[0][0], ids[0][0] + 257))


def test_other_words_become_unknown(tokenizer):
    assert tokenizer.encode("reach the turquoise disc").tokens[3] == "<unk>"
    assert tokenizer.encode("256", add_special_tokens=False).tokens == ["<unk>"]
    assert tokenizer.encode("", add_special_tokens=False).ids == []


def test_saved_files_load_again(tokenizer, tmp_path):
    save_tokenizer(tmp_path / "new")
    loaded = Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json"))
    text = "Task: go to the blue one, State: 0 1 2 3;\nAction: "
    assert loaded.encode(text).ids == tokenizer.encode(text).ids
    config = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["bos_token"] == "<bos>"
