"""SLM: batch scripts."""
