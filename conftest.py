"""Fixtures that every test of the workspace shares."""
