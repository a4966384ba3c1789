"""Three-dimensional convolutions with quantized weights."""
