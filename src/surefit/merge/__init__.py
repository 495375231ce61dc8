"""Adapters folded into their base model, with proof."""
