"""Quantization and transposition of projected value heads."""
