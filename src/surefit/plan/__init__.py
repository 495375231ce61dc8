"""Plan: the needs of a run before it is started: estimates (`planner`), the plan.json built from them (`build_plan`),
and the search (`search`)."""

from surefit import callable_as_stage

callable_as_stage(__name__)
