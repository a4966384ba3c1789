"""Readers of quantization configs: one module per format, found through the registry."""
