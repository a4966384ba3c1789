"""Tensor names of π0 and π0.5 checkpoints, brought to one spelling."""

import re

PALIGEMMA = "paligemma_with_expert.paligemma"
VISION = f"{PALIGEMMA}.model.vision_tower.vision_model"
PROJECTOR = f"{PALIGEMMA}.model.multi_modal_projector.linear"
LANGUAGE = f"{PALIGEMMA}.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
# The embedding is tied to the output head. Many files store it only under the head's name; a file
# that has both uses the embedding, and its head may be stale.
EMBEDDING = (f"{LANGUAGE}.embed_tokens.weight", f"{PALIGEMMA}.lm_head.weight")

UNUSED_HEAD = "paligemma_with_expert.gemma_expert.lm_head"
UNUSED_EMBEDDING = f"{EXPERT}.embed_tokens"
_BUFFERS = re.compile(r"(^|\.)(position_ids|inv_freq|rotary_emb\.[a-z_]+)$")
_SPELLINGS = (
    (re.compile(r"^model\.(?=paligemma_with_expert\.|action_|state_proj\.|time_mlp_)"), ""),
    (re.compile(rf"^{re.escape(PALIGEMMA)}\.language_model\.lm_head\."), f"{PALIGEMMA}.lm_head."),
    (re.compile(rf"^{re.escape(PALIGEMMA)}\.language_model\.model\."), f"{LANGUAGE}."),
    (
        re.compile(rf"^{re.escape(PALIGEMMA)}\.(?=vision_tower\.|multi_modal_projector\.)"),
        f"{PALIGEMMA}.model.",
    ),
    (
        re.compile(rf"^{re.escape(PALIGEMMA)}\.model\.vision_tower\.(?!vision_model\.)"),
        f"{VISION}.",
    ),
)


def canonical(name: str) -> str | None:
    """Returns the one name we use for a stored tensor, or None if no model part needs it.

    Accepted variations: an optional leading ``model.``, a vision tower with and without its
    ``vision_model`` level, and the older ``language_model.model`` order. Left out are the expert's
    never used output head and embedding, and buffers that are computed.
    """
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    if name.startswith((f"{UNUSED_HEAD}.", f"{UNUSED_EMBEDDING}.")) or _BUFFERS.search(name):
        return None
    return name
