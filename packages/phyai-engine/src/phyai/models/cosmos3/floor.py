"""The least time a request can take: work over throughput, stage by stage.

A product of M x N x K is 2 M N K operations; attention of M queries to N keys is 4 M N features.
"""

from dataclasses import dataclass

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import Layout

STAGES = ("encode", "prefill", "denoise")

ENCODER_OPERATIONS = 1.87e12 / (544 * 736)
"""Of the published encoder for each pixel of one frame."""


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches, not its data sheet.

    Attributes:
        products: operations a second of the generation tower's linear layers.
        attention: operations a second of its attention.
        dense: operations a second of convolutions.
        bandwidth: bytes a second.
    """

    products: float
    attention: float
    dense: float = 788e12
    bandwidth: float = 4.3e12


H200_BF16 = Rates(788e12, 788e12)
"""Measured on an H200: products of 8192³ in bf16, and a device copy."""

H200_8BIT = Rates(1400e12, 650e12)
"""Products in FP8 or INT8, and attention in bf16 as it is reached."""


def layer_parameters(config: Cosmos3Config) -> int:
    """Returns the parameters of the products of one layer of one tower."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matrices = 3 if config.gated else 2
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return attention + matrices * config.hidden_size * config.intermediate_size


def linear_operations(config: Cosmos3Config, tokens: int) -> float:
    """Returns the operations of the linear layers in one forward of ``tokens`` media tokens."""
    return 2.0 * tokens * layer_parameters(config) * config.num_hidden_layers


def attention_operations(config: Cosmos3Config, tokens: int, text: int) -> float:
    """Returns the operations of attention in one forward behind a text of ``text`` tokens."""
    queries = config.num_attention_heads * config.head_dim
    return 4.0 * tokens * (tokens + text) * queries * config.num_hidden_layers


def text_bytes(config: Cosmos3Config) -> float:
    """Returns the bytes of the understanding tower in 16 bits, which reading a text moves."""
    keys = 2 * config.num_key_value_heads * config.head_dim * config.hidden_size
    return 2.0 * (layer_parameters(config) * (config.num_hidden_layers - 1) + keys)


def floor_ms(
    config: Cosmos3Config,
    layout: Layout,
    sampling: Sampling,
    texts: tuple[int, ...],
    *,
    canvas: tuple[int, int] | None = None,
    cached: bool = True,
    rates: Rates = H200_BF16,
) -> dict[str, float]:
    """Returns the least milliseconds of each stage and their ``total``.

    Args:
        config: sizes.
        layout: of the media.
        sampling: steps and guidance.
        texts: tokens of the conditional text and, if guided, of the other.
        canvas: height and width of the encoded frame; None: nothing is encoded.
        cached: whether the texts were read before.
        rates: of the device and of the weight formats.
    """
    tokens = layout.tokens(config.latent_patch_size)
    products = attention = 0.0
    for timestep in sampling.noise_schedule().timesteps:
        for text in texts[: 1 + sampling.guides(timestep)]:
            products += linear_operations(config, tokens)
            attention += attention_operations(config, tokens, text)
    pixels = 0 if canvas is None else canvas[0] * canvas[1]
    found = {
        "encode": 1e3 * ENCODER_OPERATIONS * pixels / rates.dense,
        "prefill": 0.0 if cached else 1e3 * text_bytes(config) / rates.bandwidth,
        "denoise": 1e3 * (products / rates.products + attention / rates.attention),
    }
    return {**found, "total": sum(found.values())}
