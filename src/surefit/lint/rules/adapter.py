"""ADP: what is trained beside the frozen weights."""
