"""Objectives on pairs of answers, beside the cross-entropy: one file each for the formula."""
