"""Scores with their uncertainty."""
