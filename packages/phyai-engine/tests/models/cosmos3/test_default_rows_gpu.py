"""Default rows on a GPU, those of FlashInfer among them. Its modules are built at the first run."""

import pytest
import torch

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import ActionLayout, Layout, Modalities

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYOUT = Layout(3, 33, 40, (0,), 15.0, ActionLayout(33, 0, (0,), 8, 2))


@pytest.fixture(autouse=True)
def rows():
    """Nothing is left out, unlike in the other files."""


@pytest.mark.parametrize("tokens", [(37, 10), (37, 37)], ids=str)
@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_half_precision_equals_the_cpu_in_full_precision(variant, tokens):
    sizes = {"head_dim": 128, "mrope_section": (24, 20, 20), "hidden_size": 256}
    config = Cosmos3Config.tiny(variant, intermediate_size=384, **sizes)
    wide = random_transformer(config, params_dtype=torch.float32, device="cpu")
    half = random_transformer(config, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for ours, theirs in zip(half.parameters(), wide.parameters(), strict=True):
            ours.copy_(theirs)
    generator = torch.Generator().manual_seed(0)
    video = torch.randn(4, 3, 33, 40, generator=generator)
    action = torch.randn(33, config.action_dim, generator=generator)
    answers = []
    for model in (wide, half):
        texts = [model.prefill(torch.arange(first, first + n)) for first, n in enumerate(tokens)]
        state = Modalities(video, action).map(lambda part, to=model.device: part.to(to))
        answers.append(model.velocities(state, 833, texts, LAYOUT))
    for exact, rounded in zip(*answers, strict=True):
        for part in ("video", "action"):
            flat = (getattr(one, part).flatten().double().cpu() for one in (exact, rounded))
            assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.999
