"""The least time a chunk can take: work over throughput, stage by stage.

A product of M x N x K is 2 M N K operations. A stage takes the larger of its operations over the
rate of the matrix units and its weights (and, for the expert, cache) over the memory's bandwidth.
"""

from dataclasses import dataclass

from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.sizes import DecoderSizes

STAGES = ("vision", "prefix", "denoise")


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches, not its data sheet.

    Attributes:
        operations: of the matrix units in a second.
        bandwidth: bytes a second.
        weight_bytes: bytes of one weight.
    """

    operations: float
    bandwidth: float
    weight_bytes: float = 2.0


H200_BF16 = Rates(790e12, 4.3e12)
"""Measured on an H200: products of 4096³ in bf16, and a device copy."""


def vision_operations(config: PI05Config, views: int) -> float:
    """Returns the operations of the tower and its projector for ``views`` images."""
    sizes = config.vision
    rows, width = views * sizes.tokens, sizes.width
    block = 2 * rows * width * (4 * width + 2 * sizes.mlp) + 4 * rows * sizes.tokens * width
    patch = 2 * rows * 3 * sizes.patch**2 * width
    return sizes.layers * block + patch + 2 * rows * width * config.language.width


def prefix_operations(config: PI05Config, rows: int) -> float:
    """Returns the operations of the language model, its last layer reduced to keys and values."""
    sizes = config.language
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    projections = 2 * rows * sizes.width * (2 * queries + 2 * keys)
    layer = projections + 6 * rows * sizes.width * sizes.mlp + 4 * rows**2 * queries
    return (sizes.layers - 1) * layer + 4 * rows * sizes.width * keys


def step_operations(config: PI05Config, rows: int, prefix: int) -> float:
    """Returns the operations of one Euler step with ``rows`` action tokens."""
    sizes = config.expert
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layer = 2 * rows * sizes.width * (2 * queries + 2 * keys) + 6 * rows * sizes.width * sizes.mlp
    layer += 4 * rows * (prefix + rows) * queries
    return sizes.layers * layer + 4 * rows * sizes.width * config.max_action_dim


def _decoder_weights(sizes: DecoderSizes) -> int:
    width, mlp = sizes.width, sizes.mlp
    queries = sizes.heads * sizes.head_dim
    keys = sizes.kv_heads * sizes.head_dim
    return width * (2 * queries + 2 * keys) + 3 * width * mlp


def floor_ms(
    config: PI05Config,
    *,
    views: int,
    prompt: int,
    batch: int = 1,
    steps: int | None = None,
    rates: Rates = H200_BF16,
) -> dict[str, float]:
    """Returns the least milliseconds of each stage and their ``total``.

    Args:
        config: sizes.
        views: images of a request.
        prompt: prompt tokens of a request that are computed.
        batch: requests.
        steps: Euler steps; the checkpoint's number if None.
        rates: of the device and of the weight format.
    """
    steps = config.num_steps if steps is None else steps
    prefix = views * config.vision.tokens + prompt
    vision, language, expert = config.vision, config.language, config.expert
    tower = vision.layers * vision.width * (4 * vision.width + 2 * vision.mlp)
    tower += vision.width * (3 * vision.patch**2 + language.width)
    keys = 2 * language.kv_heads * language.head_dim
    body = (language.layers - 1) * _decoder_weights(language) + language.width * keys
    cache = 2 * batch * prefix * language.layers * keys
    loop = expert.layers * _decoder_weights(expert) * rates.weight_bytes + cache
    work = {
        "vision": (batch * vision_operations(config, views), tower * rates.weight_bytes),
        "prefix": (batch * prefix_operations(config, prefix), body * rates.weight_bytes),
        "denoise": (
            steps * batch * step_operations(config, config.suffix_len, prefix),
            steps * loop,
        ),
    }
    found = {
        stage: 1e3 * max(operations / rates.operations, moved / rates.bandwidth)
        for stage, (operations, moved) in work.items()
    }
    return {**found, "total": sum(found.values())}
