"""Attention loops in plain Triton for GPUs whose matrix instructions multiply mixed signs."""
