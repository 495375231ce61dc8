"""Checkpoints that are complete or not there (manager)."""
