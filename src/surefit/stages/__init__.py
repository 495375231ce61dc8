"""The stages of a run as functions, for the command line and the Python interface."""
