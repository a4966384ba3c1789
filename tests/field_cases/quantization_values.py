"""Names and configs that the field cases of quantization share."""

ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def compressed(*presets, **values):
    groups = {"config_groups": {preset: ["Linear"] for preset in presets}}
    return {"quant_method": "compressed-tensors", **groups, **values}


def modelopt(**quantization):
    return {"producer": {"name": "modelopt"}, "quantization": quantization}


def scheme(plan, name, **kwargs):
    return plan.resolve(name, "Linear", **kwargs)
