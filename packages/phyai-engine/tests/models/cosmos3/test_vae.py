"""The VAE's sizes, memory, tiles and errors."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from phyai.checkpoints.slots import stored_shapes
from phyai.models.cosmos3.hashed import hashed
from phyai.models.cosmos3.vae import TileConfig, WanVAE, WanVAEConfig, model
from phyai.models.cosmos3.vae.config import LATENTS_MEAN, LATENTS_STD
from phyai.models.cosmos3.vae.convs import CausalConv
from phyai.models.cosmos3.vae.random_weights import fill, tiny_config
from phyai.models.cosmos3.vae.resample import UpTime
from phyai.models.cosmos3.vae.stream import Stream


@pytest.fixture(scope="module")
def vae():
    return fill(WanVAE(tiny_config()))


@pytest.fixture
def streams(monkeypatch):
    made = []

    class Watched(Stream):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(model, "Stream", Watched)
    return made


def latents(frames, rows=2, columns=3):
    return 2 * hashed("latents", (6, frames, rows, columns))


def test_wan_2_2_has_the_published_number_of_parameters():
    shapes = stored_shapes(WanVAE(WanVAEConfig(), device="meta"))
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    assert len(sizes) == 196
    assert sum(sizes.values()) == 704_688_668
    for part, count in (("encoder.", 149_627_776), ("decoder.", 555_049_228)):
        assert sum(size for name, size in sizes.items() if name.startswith(part)) == count
    for name, shape in {
        "encoder.conv_in.weight": (160, 12, 3, 3, 3),
        "encoder.conv_out.weight": (96, 640, 3, 3, 3),
        "encoder.mid_block.attentions.0.to_qkv.weight": (1920, 640, 1, 1),
        "encoder.mid_block.attentions.0.norm.gamma": (640, 1, 1),
        "encoder.norm_out.gamma": (640, 1, 1, 1),
        "decoder.mid_block.attentions.0.to_qkv.weight": (3072, 1024, 1, 1),
        "decoder.up_blocks.0.upsampler.time_conv.weight": (2048, 1024, 3, 1, 1),
        "decoder.conv_out.weight": (12, 256, 3, 3, 3),
    }.items():
        assert shapes[name] == shape


def test_the_published_statistics():
    assert len(LATENTS_MEAN) == len(LATENTS_STD) == 48
    assert sum(LATENTS_MEAN) == pytest.approx(-0.5589)
    assert sum(LATENTS_STD) == pytest.approx(32.536)
    assert (LATENTS_MEAN[0], LATENTS_MEAN[-1]) == (-0.2289, -0.0667)
    assert (LATENTS_STD[0], LATENTS_STD[-1]) == (0.4765, 0.7744)


def test_the_published_config_is_the_default():
    values = {
        "_class_name": "AutoencoderKLWan",
        "attn_scales": [],
        "base_dim": 160,
        "decoder_base_dim": 256,
        "dim_mult": [1, 2, 4, 4],
        "dropout": 0.0,
        "in_channels": 12,
        "is_residual": True,
        "latents_mean": list(LATENTS_MEAN),
        "latents_std": list(LATENTS_STD),
        "num_res_blocks": 2,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 4,
        "temperal_downsample": [False, True, True],
        "z_dim": 48,
    }
    assert WanVAEConfig.from_dict(values) == WanVAEConfig()
    assert (WanVAEConfig().spatial, WanVAEConfig().temporal) == (16, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_dim": 0}, "z_dim = 0; it must be a positive integer"),
        ({"base_dim": True}, "base_dim = True"),
        ({"base_dim": 12}, "base_dim = 12; it must be a multiple of 8"),
        ({"latents_std": [1.0]}, "latents_std = .* 48 numbers"),
        ({"latents_mean": ["a"] * 48}, "latents_mean"),
        ({"latents_std": [0.0] * 48}, "positive numbers"),
        ({"dim_mult": []}, "dim_mult"),
        ({"dim_mult": [1, 2.5, 4, 4]}, "dim_mult"),
        ({"dim_mult": [4, 1, 4, 4], "base_dim": 160}, "makes|widths"),
        ({"dim_mult": [2, 3, 3, 3]}, "widths that divide"),
        ({"temperal_downsample": [True, 1, False]}, "3 booleans"),
        ({"temperal_downsample": [True]}, "3 booleans"),
        ({"is_residual": False}, "is_residual = False; it must be True"),
        ({"patch_size": None}, "patch_size = None"),
        ({"attn_scales": [1.0]}, "attn_scales"),
        ({"scale_factor_spatial": 8}, "scale_factor_spatial = 8; it must be 16"),
        ({"scale_factor_temporal": 8}, "scale_factor_temporal = 8; it must be 4"),
        ({"in_channels": 3}, "in_channels = 3; it must be 12"),
        ({"with_time": 1}, "unknown fields with_time; known are"),
    ],
)
def test_a_wrong_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        WanVAEConfig.from_dict(changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda vae: vae.encode(torch.zeros(3, 4, 32, 32)), r"1 \+ 4 k frames, got 4"),
        (lambda vae: vae.encode(torch.zeros(3, 0, 32, 32)), r"1 \+ 4 k frames, got 0"),
        (lambda vae: vae.encode(torch.zeros(3, 1, 32, 40)), "multiples of 16 pixels, got 32 x 40"),
        (lambda vae: vae.encode(torch.zeros(3, 1, 0, 16)), "multiples of 16"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 1, 16, 16)), r"\[3, T, H, W\]"),
        (lambda vae: vae.encode(torch.zeros(4, 1, 16, 16)), r"\[3, T, H, W\]"),
        (lambda vae: vae.encode(torch.zeros(3, 1, 16, 16).byte()), "floating point"),
        (lambda vae: vae.encode(torch.zeros(3, 5, 16, 16), frames=3), "2 latent frames, .* 3"),
        (lambda vae: vae.encode(torch.zeros(3, 5, 16, 16), frames=0), "2 latent frames, .* 0"),
        (lambda vae: vae.encode_frame(torch.zeros(3, 1, 16, 16)), r"\[3, H, W\]"),
        (lambda vae: vae.decode(torch.zeros(5, 1, 2, 2)), r"\[6, T, h, w\], got \[5, 1, 2, 2\]"),
        (lambda vae: vae.decode_stream(torch.zeros(6, 0, 2, 2)), r"\[6, T, h, w\]"),
        (lambda vae: vae.decode(latents(1), group=SimpleNamespace()), "no tiling"),
    ],
)
def test_a_wrong_input_is_refused(vae, call, message):
    with pytest.raises(ValueError, match=message):
        call(vae)


def test_a_part_that_was_not_built_is_named():
    config = tiny_config()
    with pytest.raises(ValueError, match="no decoder"):
        WanVAE(config, parts=("encoder",)).decode(latents(1))
    with pytest.raises(ValueError, match="no encoder"):
        WanVAE(config, parts=("decoder",)).encode(torch.zeros(3, 1, 16, 16))
    with pytest.raises(ValueError, match="has the parts"):
        WanVAE(config, parts=())
    with pytest.raises(ValueError, match="has the parts"):
        WanVAE(config, parts=("encoder", "tail"))


def test_the_parts_compute_as_the_whole(vae):
    encoder, decoder = (fill(WanVAE(tiny_config(), parts=(part,))) for part in model.PARTS)
    clip = hashed("clip", (3, 5, 16, 32))
    assert torch.equal(encoder.encode(clip), vae.encode(clip))
    assert torch.equal(decoder.decode(latents(2)), vae.decode(latents(2)))


def test_the_state_of_a_clip_is_two_frames_of_each_convolution(vae, streams):
    held = []
    for _ in vae.decode_stream(latents(5, 1, 2)):
        (stream,) = streams
        held.append(stream.bytes)
    # At the first frame, layers that double the frames only note that there was one.
    assert held[0] < held[1] == held[2] == held[3] == held[4]
    layers = [layer for layer in vae.decoder.modules() if isinstance(layer, CausalConv | UpTime)]
    states = [stream.get(layer) for layer in layers]
    assert all(len(state) == 2 for state in states)
    assert held[-1] == sum(state.numel() * 4 for state in states)


def test_an_encoded_clip_leaves_bounded_state(vae, streams):
    clip = hashed("clip", (3, 13, 32, 48))
    vae.encode(clip)
    vae.encode(clip[:, :9])
    assert streams[0].bytes == streams[1].bytes > 0
    vae.encode_frame(clip[:, 0])
    assert len(streams) == 2  # one frame needs no state


def test_no_result_grows_with_the_clip(vae):
    sizes = set()

    def watch(layer, inputs, output):
        sizes.add(output.untyped_storage().nbytes())

    seen = {}
    for frames in (3, 6):
        with register_module_forward_hook(watch):
            for _ in vae.decode_stream(latents(frames, 1, 2)):
                pass
        seen[frames] = max(sizes)
        sizes.clear()
    # Bytes of the widest map: 48 channels of 8 x 16 cells, four frames and two before them.
    assert seen[3] == seen[6] == 6 * 8 * 16 * 48 * 4


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 3), (2, 4), (3, 1), (4, 5), (5, 2), (6, 3), (7, 6)]
)
def test_tiles_are_the_weighted_mean_of_what_each_decodes_to(vae, rows, columns):
    tiling, frames = TileConfig(3, 2), 2 if rows == 4 else 1
    z = latents(frames, rows, columns)
    sums = torch.zeros(4 * frames - 3, 8 * rows, 8 * columns, 12)
    weights = torch.zeros_like(sums)
    for top in range(0, max(1, rows - 1), 2):
        for left in range(0, max(1, columns - 1), 2):
            part = vae._frames(z[:, :, top : top + 3, left : left + 3])
            cells = torch.cat(list(vae._groups(part)))
            tall, broad = cells.shape[1:3]
            ramps = [torch.ones(size) for size in (tall, broad)]
            for ramp, start, stop, length in (
                (ramps[0], top, top + 3, rows),
                (ramps[1], left, left + 3, columns),
            ):
                for step in range(8):
                    if start > 0:
                        ramp[step] *= step / 8
                    if stop < length:
                        ramp[len(ramp) - 8 + step] *= 1 - step / 8
            weight = (ramps[0][:, None] * ramps[1])[None, :, :, None]
            area = (slice(None), slice(8 * top, 8 * top + tall), slice(8 * left, 8 * left + broad))
            sums[area] += cells * weight
            weights[area] += weight
    torch.testing.assert_close(weights, torch.ones_like(weights))
    torch.testing.assert_close(
        vae._decode_tiles(vae._frames(z), tiling, None), sums, atol=1e-5, rtol=1e-5
    )


def test_one_tile_is_the_whole(vae):
    whole = vae.decode(latents(2))
    tiled = fill(WanVAE(tiny_config(), parts=("decoder",), tiling=TileConfig(3, 2)))
    assert torch.equal(tiled.decode(latents(2)), whole)
    assert [len(group[0]) for group in tiled.decode_stream(latents(2))] == [1, 4]
    assert torch.equal(torch.cat(list(tiled.decode_stream(latents(2))), dim=1), whole)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_share_the_tiles(ranks, monkeypatch):
    vae = fill(WanVAE(tiny_config(), parts=("decoder",), tiling=TileConfig(2, 1)))
    z = latents(1, 3, 3)
    expected = vae._decode_tiles(vae._frames(z), vae.tiling, None)
    parts = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda blend, group: parts.append(blend.clone())
    )
    for rank in range(ranks):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks)
        vae.decode(z, group=group)
    assert len(parts) == ranks
    torch.testing.assert_close(sum(parts), expected)
    # Four tiles: a rank beyond them has nothing.
    assert [bool(part.any()) for part in parts] == [rank < 4 for rank in range(ranks)]


@pytest.mark.parametrize(("size", "stride"), [(0, 0), (4, 1), (3, 4), (4, 0)])
def test_tiles_that_cannot_be_blended_are_refused(size, stride):
    with pytest.raises(ValueError, match=f"tiles of {size} latents every {stride}"):
        TileConfig(size, stride)


def test_bf16_stays_close_and_keeps_fp32_statistics(vae):
    half = fill(WanVAE(tiny_config(), dtype=torch.bfloat16))
    clip = hashed("clip", (3, 5, 32, 32))
    found, expected = half.encode(clip), vae.encode(clip)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.03 * expected.norm()
    pixels, expected = half.decode(latents(3)), vae.decode(latents(3))
    assert pixels.dtype == torch.bfloat16
    assert (pixels.float() - expected).norm() < 0.05 * expected.norm()
    assert all(
        parameter.dtype == torch.float32
        for name, parameter in half.named_parameters()
        if name.endswith("gain")
    )


def test_inputs_may_be_strided_and_are_not_changed(vae):
    clip, z = hashed("clip", (3, 5, 32, 32)), latents(2)
    strided = torch.empty(5, 32, 32, 3).permute(3, 0, 1, 2).copy_(clip)
    assert torch.equal(vae.encode(strided), vae.encode(clip))
    flipped = torch.empty(3, 2, 2, 6).permute(3, 2, 1, 0).copy_(z)
    assert torch.equal(vae.decode(flipped), vae.decode(z))
    assert torch.equal(clip, hashed("clip", (3, 5, 32, 32)))
    assert torch.equal(z, latents(2))
