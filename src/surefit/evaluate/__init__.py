"""Scores with their uncertainty."""

from surefit import callable_as_stage

callable_as_stage(__name__)
