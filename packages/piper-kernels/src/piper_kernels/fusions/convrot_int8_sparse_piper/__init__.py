"""ConvRot INT8 projections fused with sparse Piper attention."""
