"""Activation scales: the table, its file, the measurement, and an encoder that goes all the way."""

import json

import pytest
import torch
from test_conv3d_compile import run
from tiny_encoder import make_encoder, make_video
from torch import nn

from piper_kernels.conv3d.convrot.int8 import ConvRotInt8Conv3d
from piper_kernels.specializations.minimax_h3_vae.conv3d import (
    CONVOLUTIONS,
    P995_ACTIVATION_SCALES,
    P995_INPUT_SCALES,
    ActivationScales,
    calibrate_activation_scales,
    default_group_size,
    quantize_convolutions,
)
from piper_kernels.weights.convrot._rotation import rotate_groups


def test_names():
    assert len(CONVOLUTIONS) == len(set(CONVOLUTIONS)) == 29
    assert {
        "down_blocks.5.resnets.1.conv2",
        "down_blocks.3.downsamplers.0.conv",
        "conv_out",
    } <= set(CONVOLUTIONS)
    modules = dict(make_encoder().named_modules())
    assert set(CONVOLUTIONS) <= set(modules)
    assert [default_group_size(c) for c in (64, 128, 256, 1024)] == [64, 64, 256, 256]


def test_the_shipped_table_is_empty_and_says_what_to_do():
    assert P995_INPUT_SCALES is P995_ACTIVATION_SCALES
    assert dict(P995_ACTIVATION_SCALES) == {}
    with pytest.raises(KeyError, match="calibrate_activation_scales") as error:
        P995_ACTIVATION_SCALES["conv_out"]
    assert "ActivationScales.load" in str(error.value)
    with pytest.raises(ValueError, match="calibrate_activation_scales"):
        quantize_convolutions(make_encoder(), P995_ACTIVATION_SCALES)
    with pytest.raises(TypeError):
        P995_ACTIVATION_SCALES["conv_out"] = 0.1
    with pytest.raises(KeyError, match="it has"):
        ActivationScales({"a": 0.1})["b"]


def test_files(tmp_path):
    path = tmp_path / "scales.json"
    scales = ActivationScales({"conv_out": 0.05, "other": 1 / 3}, quantile=0.99)
    scales.save(path)
    loaded = ActivationScales.load(path)
    assert dict(loaded) == dict(scales)
    assert (loaded.quantile, len(loaded), list(loaded)) == (0.99, 2, ["conv_out", "other"])
    table = json.loads(path.read_text())
    for change, message in (
        ({"version": 2}, "format and version"),
        ({"format": "x"}, "format and version"),
        ({"scales": [1]}, "object of numbers"),
        ({"scales": {"a": "1"}}, "object of numbers"),
        ({"scales": {"a": True}}, "object of numbers"),
        ({"scales": {"a": -1.0}}, "finite and positive"),
        ({"scales": {"a": float("nan")}}, "finite and positive"),
        ({"quantile": 0}, "quantile"),
    ):
        path.write_text(json.dumps(table | change))
        with pytest.raises(ValueError, match=message):
            ActivationScales.load(path)
    for text, message in (("{", "is not JSON"), ("[]", "format and version")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            ActivationScales.load(path)


class One(nn.Module):
    """A model with one convolution, which sees its input."""

    def __init__(self, channels=64):
        super().__init__()
        self.conv = nn.Conv3d(channels, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x)


@pytest.mark.parametrize("quantile", [0.5, 0.995, 1.0])
def test_the_quantile_of_rotated_tokens(quantile):
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn((2, 64, 3, 9, 7), generator=generator) for _ in range(3)]
    batches[1][0, :, 1, 2, 3] = 50.0  # one outlier of 1134 tokens
    found = calibrate_activation_scales(One(), batches, names=["conv"], quantile=quantile)
    tokens = torch.cat([b.permute(0, 2, 3, 4, 1).reshape(-1, 64) for b in batches])
    amax = rotate_groups(tokens, 64).abs().amax(-1).sort().values
    expected = amax[-(-quantile * len(amax) // 1).__int__() - 1].item() / 127
    assert found["conv"] == pytest.approx(expected, rel=2e-3)
    assert found.quantile == quantile


def test_calibration_errors():
    x = torch.randn(1, 64, 2, 4, 4)
    with pytest.raises(KeyError, match="no module 'down_blocks"):
        calibrate_activation_scales(One(), [x])
    with pytest.raises(ValueError, match="conv: no token was counted"):
        calibrate_activation_scales(One(), [], names=["conv"])
    for value in (torch.inf, torch.nan):
        x[0, 0, 0, 0, 0] = value
        with pytest.raises(ValueError, match="not finite"):
            calibrate_activation_scales(One(), [x], names=["conv"], quantile=1.0)
    for quantile in (0.0, 1.5):
        with pytest.raises(ValueError, match="quantile"):
            calibrate_activation_scales(One(), [x], names=["conv"], quantile=quantile)


def test_a_silent_convolution_gets_a_positive_scale():
    model = One()
    zeros = [torch.zeros(1, 64, 2, 4, 4)]
    found = calibrate_activation_scales(model, zeros, names=["conv"])
    assert found["conv"] == pytest.approx(1e-30)
    assert not model.conv._forward_pre_hooks


def test_run_and_group_size_are_the_callers():
    seen = []
    calibrate_activation_scales(
        One(),
        [{"x": torch.randn(1, 64, 1, 3, 3)}],
        names=["conv"],
        group_size=lambda channels: seen.append(channels) or 16,
        run=lambda model, batch: model(batch["x"]),
    )
    assert seen == [64]


def test_conversion_errors():
    model = nn.Module()
    model.small = nn.Conv3d(64, 4, 1)
    model.dilated = nn.Conv3d(64, 4, 3, dilation=2)
    model.grouped = nn.Conv3d(64, 4, 3, groups=2)
    model.linear = nn.Linear(64, 4)
    for name, message in (
        ("small", r"\[O, C, 3, 3, 3\]"),
        ("linear", r"\[O, C, 3, 3, 3\]"),
        ("dilated", "dilation"),
        ("grouped", "groups"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_convolutions(model, {name: 0.1})
    with pytest.raises(KeyError, match="no module 'absent'"):
        quantize_convolutions(model, {"absent": 0.1})
    with pytest.raises(KeyError, match="small"):
        quantize_convolutions(model, {}, names=("small",))
    assert isinstance(model.small, nn.Conv3d)


def test_an_encoder_all_the_way(tmp_path):
    """Calibrate, store, load, quantize, compile, and compare with the float16 encoder."""
    model, video = make_encoder(), make_video()
    with torch.no_grad():
        expected = model(video)
    calibrate_activation_scales(model, [make_video(seed=s) for s in (1, 2)]).save(
        tmp_path / "scales.json"
    )
    scales = ActivationScales.load(tmp_path / "scales.json")
    assert set(scales) == set(CONVOLUTIONS)
    assert all(1e-3 < scale < 1 for scale in scales.values())
    assert quantize_convolutions(model, scales) is model
    packed = {n for n, m in model.named_modules() if isinstance(m, ConvRotInt8Conv3d)}
    assert packed == set(CONVOLUTIONS)
    with torch.no_grad():
        eager = model(video)
    compiled, capture = run(model, video)
    assert capture.operators.count("convrot_int8_group_norm_silu_conv3d") == 25
    assert capture.operators.count("convrot_int8_conv3d") == 4
    assert len(capture.operators) == 29
    # What is left: the first convolution with its two paddings and one shortcut.
    assert len(capture.nodes) == 29 + 4
    # Errors of 29 layers; another rounding between two layers moves codes of all that follow.
    assert relative_error(eager, expected) < 0.12
    assert relative_error(compiled, expected) < 0.12
    assert relative_error(compiled, eager) < 0.12
    for name in CONVOLUTIONS:
        model.get_submodule(name).weight.act_per_tensor_scale.mul_(0.25)
    assert relative_error(model(video), expected) > 0.3


def relative_error(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
