"""ConvRot INT8 linear: rotated INT8 inputs times rotated INT8 weights."""
