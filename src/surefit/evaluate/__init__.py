"""Scores of a run's models, with confidence intervals."""

from surefit import callable_as_stage

callable_as_stage(__name__)
