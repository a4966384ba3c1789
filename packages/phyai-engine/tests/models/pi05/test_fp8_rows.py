"""FP8 rows that norms and activations make for the language model's products."""

import torch

from phyai.dispatch.config import KernelConfig
from phyai.layers import Linear
from phyai.models.measuring import policy_in_force
from phyai.models.pi05.decoder import DecoderLayer
from phyai.models.pi05.sizes import DecoderSizes
from phyai.models.pi05.stream import Stream

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
