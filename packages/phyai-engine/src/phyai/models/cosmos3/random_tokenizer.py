"""A small byte-level tokenizer with the special tokens of Cosmos3's text towers."""

import json
from pathlib import Path
from typing import Any

CORPUS = (
    "Put the red cup on the blue plate. Open the drawer and pick up the block.",
    "The video is 2.0 seconds long and is of 15 FPS. This video is of 544x736 resolution.",
    "This video contains concatenated views from multiple camera perspectives.",
    "You are a helpful assistant who will generate images from a give prompt.",
    *("user", "assistant", "system") * 8,
)
VOCABULARY = 384
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
QWEN_SPECIALS = (
    "<|endoftext|>", IM_START, IM_END, "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
"""In the order of their ids, which follow the vocabulary as in Qwen's tokenizer."""
EDGE_SPECIALS = (
    "<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 10)), IM_START, IM_END,
    *(f"<SPECIAL_{i}>" for i in range(12, 18)), "<video>", "<image>", "<|vision_start|>",
    "<|vision_end|>",
)  # fmt: skip
"""Ids 0 to 21 of the Edge tokenizer."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, variant: str) -> int:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` and returns the number of ids.

    Args:
        folder: is made when it does not exist.
        variant: ``edge`` puts the special tokens first, with the published ids; others put them
            last, with the published names.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    edge = variant == "edge"
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer
    tokenizer.train_from_iterator(
        CORPUS,
        trainer(
            vocab_size=VOCABULARY - len(QWEN_SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(EDGE_SPECIALS) if edge else [],
            show_progress=False,
        ),
    )
    if not edge:
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in QWEN_SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "bos_token": "<s>" if edge else None,
        "chat_template": CHAT_TEMPLATE,
        "eos_token": IM_END,
        "pad_token": "<unk>" if edge else "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast" if edge else "Qwen2Tokenizer",
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return tokenizer.get_vocab_size()
