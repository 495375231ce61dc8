"""The lowest layer: errors, units, the process environment and the run directory."""
