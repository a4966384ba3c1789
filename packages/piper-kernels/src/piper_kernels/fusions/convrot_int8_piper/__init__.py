"""ConvRot INT8 projections fused with dense Piper attention."""
