"""Quantized weight formats: packed storage, conversion, views and in-place updates.

Nothing here imports an operator until a matrix product uses a weight.
"""
