import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn


@pytest.fixture
def make_layer() -> Callable[..., nn.Module]:
    def make(prefix: str = "model.layers.0.mlp.down_proj") -> nn.Module:
        layer = nn.Module()
        layer.prefix = prefix
        return layer

    return make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes config.json with the inline config and hf_quant_config.json with the standalone."""

    def write(inline: object = None, standalone: object = None, **extra: object) -> Path:
        config = dict(extra)
        if inline is not None:
            config["quantization_config"] = inline
        (tmp_path / "config.json").write_text(json.dumps(config))
        if standalone is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(standalone))
        return tmp_path

    return write
