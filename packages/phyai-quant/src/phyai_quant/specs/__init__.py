"""Physical weight formats: one module per format."""
