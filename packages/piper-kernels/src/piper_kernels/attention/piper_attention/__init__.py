"""Dense Piper attention: INT8 logits and unsigned probabilities times INT8 values."""
