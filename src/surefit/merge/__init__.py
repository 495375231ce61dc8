"""Adapters folded into their base model, with proof."""

from surefit import callable_as_stage

callable_as_stage(__name__)
