"""Rows to examples: layouts, messages, reasoning, and what is checked of rows before any model is loaded."""
