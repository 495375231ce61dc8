"""The report of a run: one HTML page that works offline."""

from surefit import callable_as_stage

callable_as_stage(__name__)
