"""NVFP4 linear: inputs in the logical dtype or in NVFP4 times NVFP4 weights."""
