"""Attention operators on quantized queries, keys and values."""
