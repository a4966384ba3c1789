"""Every complete policy that a page shows is a valid policy."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
POLICY = re.compile(r"```yaml\n(schema: phyai\.kernel/.*?)```", re.DOTALL)
POLICIES = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}-{index}")
    for page in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
    for index, text in enumerate(POLICY.findall(page.read_text()))
]


@pytest.mark.parametrize("text", POLICIES)
def test_a_shown_policy_is_valid(text: str, tmp_path: Path):
    from phyai.dispatch import load_policy

    shown = tmp_path / "policy.yaml"
    shown.write_text(text)
    policy = load_policy(shown)
    assert policy.rules or policy.quant_plan


def test_the_quantization_example_selects_what_its_page_says(tmp_path: Path):
    from phyai.dispatch import load_policy

    page = (ROOT / "docs" / "policies.md").read_text()
    (text,) = [text for text in POLICY.findall(page) if "quantization:" in text]
    shown = tmp_path / "policy.yaml"
    shown.write_text(text)
    plan = load_policy(shown).quant_plan
    body = "paligemma_with_expert.paligemma.model"
    assert plan.resolve(f"{body}.vision_tower.encoder.layers.0.mlp.fc1") is None
    scheme = plan.resolve(f"{body}.language_model.layers.3.self_attn.qkv_proj")
    assert scheme.weight.rotation_group == 64
    assert plan.resolve("action_in_proj") is None
