"""MRG: whether the trained adapter can be merged without loss."""
