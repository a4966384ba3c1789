"""A small tokenizer that behaves as PaliGemma's does, for checkpoints without network access.

The rules are Gemma's: byte-pair merges over sentencepiece pieces, ids 0 to 4 for padding, end,
begin, unknown and mask, a begin token in front, single digits, spaces kept as "▁", and bytes for
characters outside the vocabulary. Only the vocabulary is smaller.
"""
# pyright: reportMissingImports=false

import contextlib
import io
import string
import tempfile
from pathlib import Path

CORPUS = (
    "Task: pick up the red block, State: 128 64 255 0 12;",
    "Task: open the drawer, State: 37 91 204 155 200;",
    "Action: ",
    "stack the cups and reach the target",
)
VOCAB_SIZE = 320
LETTERS = string.ascii_lowercase + string.digits + "TSA"


def train_sentencepiece(corpus: tuple[str, ...] = CORPUS, vocab_size: int = VOCAB_SIZE) -> bytes:
    """Return a serialized sentencepiece model of at most ``vocab_size`` pieces."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*corpus, " ".join(LETTERS)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=["<mask>", "\n"],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def write_tokenizer(directory: Path, corpus: tuple[str, ...] = CORPUS) -> None:
    """Write ``tokenizer.model``, ``tokenizer.json`` and ``tokenizer_config.json``.

    The two last files are written by transformers, which converts the sentencepiece model.
    """
    from transformers import GemmaTokenizer

    model = train_sentencepiece(corpus)
    (directory / "tokenizer.model").write_bytes(model)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        Path("tokenizer.model").write_bytes(model)
        tokenizer = GemmaTokenizer.from_pretrained(".", add_bos_token=True)
        tokenizer.save_pretrained(directory)
