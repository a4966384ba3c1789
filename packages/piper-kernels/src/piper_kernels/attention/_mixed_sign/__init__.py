"""Plans and launches of the attention loops in plain Triton."""

from piper_kernels.attention._mixed_sign.plan import AttentionPlan, Product, fp8_plan, piper_plan

__all__ = ["AttentionPlan", "Product", "fp8_plan", "piper_plan"]
