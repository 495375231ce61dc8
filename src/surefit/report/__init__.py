"""The report: one offline page that explains a run."""

from surefit import callable_as_stage

callable_as_stage(__name__)
