"""The stages of a run as functions: what the command line shows and the Python interface returns."""
