"""FP8 rows that norms and activations make for products of the language model and the tower."""

import torch

from phyai.dispatch.config import KernelConfig
from phyai.layers import Linear
from phyai.models.measuring import policy_in_force
from phyai.models.pi05.decoder import DecoderLayer
from phyai.models.pi05.sizes import DecoderSizes, VisionSizes
from phyai.models.pi05.stream import Stream
from phyai.models.pi05.vision import VisionTower

SIZES = DecoderSizes(32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=48)
POLICY = {
    "quantization": {
        "rules": [
            {
                "match": {"regex": r"body\.layers\.0\..*_proj$"},
                "weight": {"dtype": "fp8_e4m3"},
                "input": {"dtype": "fp8_e4m3"},
                "stored_by": "fp8_rows",
            }
        ]
    }
}


def test_a_plain_layer_rounds_in_its_norms_and_its_activation(fused, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    with policy_in_force(KernelConfig(policy_config=POLICY), "cpu", "pi05"):
        layer = DecoderLayer(
            SIZES, prefix="body.layers.0", index=1, role="prefix", attention_role="prefix",
            adaptive=False, params_dtype=torch.bfloat16, device="cpu",
        )  # fmt: skip
    for module in layer.modules():
        if isinstance(module, Linear):
            for leg in module.legs:
                weight = normal(leg.width, module.in_features) * module.in_features**-0.5
                module.spec.load_weight(module, "weight", weight, leg.shard_id)
            module.post_load()
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.data.copy_(0.1 * normal(32))
    stream, attended = Stream(normal(5, 32), normal(5, 32)), normal(5, 2, 16)

    def run():
        heads, behind = layer.project(stream)
        end = layer.finish(behind, attended)
        return heads, end.residual, end.update

    found = run()
    assert fused == ["rmsnorm_rows", "product", "rmsnorm_rows", "activation_rows"]
    fused.clear()
    monkeypatch.setattr(Linear, "takes_fp8_rows", lambda *_: False)
    expected = run()
    assert fused == 4 * ["product"]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 2e-2


def test_a_tower_rounds_in_its_layer_norms_and_its_activations(fused, monkeypatch):
    """Its outputs of attention are rounded by the product that reads them."""
    generator = torch.Generator().manual_seed(0)
    sizes = VisionSizes(width=32, layers=2, heads=2, mlp=48, patch=2, tokens=4)
    regex = r".*encoder\.layers\.\d+\.(self_attn\.(qkv_proj|out_proj)|mlp\.(fc1|fc2))$"
    rule = {**POLICY["quantization"]["rules"][0], "match": {"regex": regex}}
    policy = {"quantization": {"rules": [rule]}}
    with policy_in_force(KernelConfig(policy_config=policy), "cpu", "pi05"):
        tower = VisionTower(sizes, 16, params_dtype=torch.bfloat16, device="cpu")
    for name, module in tower.named_modules():
        if isinstance(module, Linear):
            for leg in module.legs:
                weight = torch.randn(leg.width, module.in_features, generator=generator)
                weight *= module.in_features**-0.5
                module.spec.load_weight(module, "weight", weight.bfloat16(), leg.shard_id)
            module.bias.data.copy_(0.3 * torch.randn(module.bias.shape, generator=generator))
            module.post_load()
            continue
        for key, parameter in module.named_parameters(recurse=False):
            drawn = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn + (key == "weight" and "norm" in name))
    images = torch.randn(3, 3, 4, 4, generator=generator)
    found = tower(images)
    assert fused == 2 * ["layernorm_rows", "product", "layernorm_rows", "activation_rows"]
    fused.clear()
    monkeypatch.setattr(Linear, "takes_fp8_rows", lambda *_: False)
    expected = tower(images)
    assert fused == 8 * ["product"]
    assert found.shape == (3, 4, 16)
    assert (found.float() - expected.float()).norm() / expected.float().norm() < 2e-2
