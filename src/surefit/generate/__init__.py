"""Text generation: decoding, constrained decoding, inference servers, and label ranking."""
