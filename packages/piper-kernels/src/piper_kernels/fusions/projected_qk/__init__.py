"""RMS normalization, rotary embedding and quantization of projected query and key heads."""
