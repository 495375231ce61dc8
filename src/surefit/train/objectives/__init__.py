"""Objectives on pairs of answers and on labelled answers, beside the cross-entropy: one file each for the formula."""
