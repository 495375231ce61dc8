"""The ground floor: errors, units, the process environment and the run directory."""
