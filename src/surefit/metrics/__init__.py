"""Metrics of answers against gold: pure functions over parsed values, no model, no torch."""
