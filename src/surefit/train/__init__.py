"""Training: one optimizer step (step), the loop around it (loop), and what both use (loss, optim, sampler)."""

from surefit import callable_as_stage

callable_as_stage(__name__)
