"""ARG: keys of other tools that are gone, unknown or without effect."""
