"""Plan: what a run needs before it is started: estimates (forecast), put together (document), searched (search)."""

from surefit import callable_as_stage

callable_as_stage(__name__)
