"""Examples to token ids and labels: templates, tokenizing, packing, collating, and tokens on disk."""
