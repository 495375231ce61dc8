"""Plan: what a run needs before it is started. `static` is the part that arithmetic knows."""

from surefit import callable_as_stage

callable_as_stage(__name__)
