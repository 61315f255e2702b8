"""Checkpoints: written once by the chief, complete or invisible, restored with any strategy or none."""
