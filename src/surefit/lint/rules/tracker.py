"""TRK: experiment trackers."""
