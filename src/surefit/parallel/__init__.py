"""Distributed optimizer steps: the processes (process_group), and one engine per parallel mode (engine)."""
