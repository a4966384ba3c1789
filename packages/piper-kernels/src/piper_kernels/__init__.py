"""Quantized tensor formats and inference operators for PyTorch.

Importing this package loads neither torchao nor triton; the subpackages that need
them import them.
"""
