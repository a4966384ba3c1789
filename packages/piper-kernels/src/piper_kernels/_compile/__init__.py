"""Shared machinery of the Inductor graph passes; see README.md."""
