"""A word-level tokenizer that is small enough to ship: the words of the task and the state bins."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from reach.instructions import COLOUR_NAMES, TEMPLATES

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
SPECIALS = (PAD, EOS, BOS, UNK)
MAX_LENGTH = 48
"""Prompt slots of the checkpoint; the longest instruction of the task needs 22."""
BINS = range(-1, 256)
_MULTIPLE = 64
_WORD = r"-?\d+|[a-z]+|\n|[^\sa-z\d]"


def build_tokenizer() -> Tokenizer:
    """The tokenizer: lower-cased words, whole numbers, a newline and single punctuation marks.

    An encoding is ``<bos>`` and the tokens, without ``<eos>``. A word outside the vocabulary
    becomes ``<unk>``. The vocabulary is filled to a multiple of 64 with unused entries.
    """
    vocabulary = {token: index for index, token in enumerate(_vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=None, special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    """Write the files from which ``AutoTokenizer.from_pretrained(directory)`` loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    names = {"pad_token": PAD, "eos_token": EOS, "bos_token": BOS, "unk_token": UNK}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "special_tokens_map.json", names)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _vocabulary() -> list[str]:
    """All tokens by id; the numbers are consecutive."""
    sentences = (template.replace("{colour}", "") for template in TEMPLATES)
    words = {word for sentence in sentences for word in sentence.split()} | set(COLOUR_NAMES)
    words |= {"task", "state", "action"}
    tokens = [*SPECIALS, *":,;.!?-'\n", *(str(number) for number in BINS), *sorted(words)]
    unused = -len(tokens) % _MULTIPLE
    return tokens + [f"<unused{index}>" for index in range(unused)]
