"""Rows to examples: layouts, messages, reasoning, and the checks of rows before any model is loaded."""
