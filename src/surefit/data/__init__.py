"""Rows become token ids: read (load), understood (formats), tokenised with labels (tokenize), batched (collate)."""
