"""The PaliGemma tokenizer of a checkpoint: found, loaded, applied; nothing is downloaded."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phyai.processing.errors import ProcessingError

logger: logging.Logger = logging.getLogger(__name__)

PAD_ID = 0
DEFAULT_BOS_ID = 2
FILE_NAMES = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")
_FOLDERS = (".", "tokenizer", "assets")


@dataclass(frozen=True)
class PromptTokenizer:
    """Turns prompts into padded token ids: one BOS in front, no EOS, padding on the right.

    Attributes:
        source: The file that it was loaded from.
        bos_id: Id put in front of every prompt.
        vocab_size: Number of ids.
        encode_piece: Ids of one text without any special token.
    """

    source: Path
    bos_id: int
    vocab_size: int
    encode_piece: Callable[[str], list[int]]

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Returns `[BOS]` followed by the ids of every piece, untruncated."""
        return [self.bos_id, *(i for piece in pieces if piece for i in self.encode_piece(piece))]

    def encode_batch(
        self, prompts: Sequence[Sequence[str]], max_length: int
    ) -> tuple[Tensor, Tensor]:
        """Tokenises B prompts into L = `max_length` slots.

        Prompts that are longer lose their end, and a warning is logged.

        Args:
            prompts: B prompts, each as pieces.
            max_length: Slots per prompt.

        Returns:
            int64 `[B, L]` ids, padded with 0, and bool `[B, L]`, True for real tokens.
        """
        tokens = torch.full((len(prompts), max_length), PAD_ID, dtype=torch.int64)
        mask = torch.zeros((len(prompts), max_length), dtype=torch.bool)
        for row, pieces in enumerate(prompts):
            ids = self.encode(pieces)
            if len(ids) > max_length:
                logger.warning(
                    "prompt of %d tokens truncated to the %d slots of the policy: %.80r",
                    len(ids),
                    max_length,
                    "".join(pieces),
                )
                ids = ids[:max_length]
            tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            mask[row, : len(ids)] = True
        return tokens, mask


def find_tokenizer(
    checkpoint_dir: Path, *, override: Path | None = None, named: str | None = None
) -> Path:
    """Finds the tokenizer file of a checkpoint.

    Args:
        checkpoint_dir: The checkpoint.
        override: A file or folder given by the user; nothing else is searched then.
        named: `tokenizer_name` of the processor files: used when it is a path that exists,
            else it is taken as a hub name and the checkpoint's own files are searched.

    Returns:
        The file.

    Raises:
        ProcessingError: No tokenizer file was found; the message names the places searched.
    """
    if override is not None:
        places = _candidates(override.expanduser())
    else:
        places = []
        if named and (checkpoint_dir / named).exists():
            places += _candidates(checkpoint_dir / named)
        for folder in _FOLDERS:
            places += [checkpoint_dir / folder / name for name in FILE_NAMES]
    for place in places:
        if place.is_file():
            return place
    searched = "\n  ".join(str(place) for place in places)
    hub = f" (the processor names {named!r}, which is not fetched)" if named else ""
    raise ProcessingError(
        f"no tokenizer found for {checkpoint_dir}{hub}; searched:\n  {searched}\n"
        "Copy tokenizer.json of google/paligemma-3b-pt-224 or paligemma_tokenizer.model into the "
        "checkpoint folder, or pass the tokenizer's path"
    )


def load_tokenizer(path: Path) -> PromptTokenizer:
    """Loads `*.json` through tokenizers and any other file through sentencepiece.

    Raises:
        ProcessingError: The file can not be read as a tokenizer.
    """
    try:
        return _load_json(path) if path.suffix == ".json" else _load_sentencepiece(path)
    except ProcessingError:
        raise
    except Exception as error:
        raise ProcessingError(
            f"{path} can not be read as a tokenizer ({error}); replace it by tokenizer.json or "
            "paligemma_tokenizer.model of PaliGemma"
        ) from error


def _candidates(path: Path) -> list[Path]:
    if path.is_dir():
        return [path / name for name in FILE_NAMES]
    return [path]


def _load_json(path: Path) -> PromptTokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # A task that spells "<bos>" is text, not a second BOS.
    tokenizer.encode_special_tokens = True
    bos = tokenizer.token_to_id("<bos>")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return PromptTokenizer(
        source=path,
        bos_id=DEFAULT_BOS_ID if bos is None else bos,
        vocab_size=tokenizer.get_vocab_size(),
        encode_piece=encode,
    )


def _load_sentencepiece(path: Path) -> PromptTokenizer:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    processor.LoadFromFile(str(path))
    bos = processor.bos_id()

    def encode(text: str) -> list[int]:
        return processor.EncodeAsIds(text)

    return PromptTokenizer(
        source=path,
        bos_id=bos if bos >= 0 else DEFAULT_BOS_ID,
        vocab_size=processor.vocab_size(),
        encode_piece=encode,
    )
