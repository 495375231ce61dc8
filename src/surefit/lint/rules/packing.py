"""PCK: several examples in one row."""
