"""Cosmos3: video, action and sound from one transformer of two towers."""
