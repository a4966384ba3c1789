"""Schedules and fusions for the graphs of single models."""
