"""Work on checkpoints that are at rest: quantize, check and compare them with bounded memory."""
