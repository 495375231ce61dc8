"""Training: one step (step), the loop around it (loop), and what both are made of (loss, optim, sampler)."""

from surefit import callable_as_stage

callable_as_stage(__name__)
