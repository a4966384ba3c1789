"""Linear operators on quantized weights."""
