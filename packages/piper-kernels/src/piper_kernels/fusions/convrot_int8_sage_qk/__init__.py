"""ConvRot INT8 projections whose heads leave quantized, as Piper attention reads them."""
