"""Reads the 8-bit checkpoints of bitsandbytes; phyai-quant finds it by its entry points."""
