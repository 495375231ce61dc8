"""Merging adapters into their base model, with a certificate that the result is correct."""

from surefit import callable_as_stage

callable_as_stage(__name__)
