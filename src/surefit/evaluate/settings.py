"""Checks that evaluation settings do not contradict each other. Torch-free, so that `check` can run it."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import EvaluateSection
from surefit.core.errors import ConfigError
from surefit.task import TaskRecipe

GENERATING = {"constrained": "none", "num_beams": 1, "samples": 1, "temperature": 0.0, "server": None}
"""Settings without meaning for a task that ranks labels, with their neutral values."""


def require_evaluation_settings(section: EvaluateSection, recipe: TaskRecipe) -> None:
    """Raise if the settings contradict each other, before anything costly starts.

    Raises:
        ConfigError: the first of the `evaluate` settings that contradict each other, or that the recipe does not
            support; the others are in its `also`.
    """
    errors = list(_contradictions(section, recipe))
    if errors:
        errors[0].also = tuple(errors[1:])
        raise errors[0]


def _contradictions(section: EvaluateSection, recipe: TaskRecipe) -> Iterator[ConfigError]:
    if recipe.choices is not None:
        yield from _of_ranking(section, recipe)
        return
    if section.constrained != "none" and recipe.grammar is None:
        yield ConfigError(
            f"the recipe {recipe.name} has no grammar, so its answers cannot be constrained",
            code="E7032",
            field="evaluate.constrained",
            help="write constrained: none, or give the recipe a grammar",
        )
    if section.samples > 1 and recipe.score_samples is None:
        yield ConfigError(
            f"the recipe {recipe.name} scores one answer per prompt, not {section.samples}",
            code="E7033",
            field="evaluate.samples",
            help="write samples: 1, or give the recipe a score_samples",
        )
    if section.samples > 1 and section.temperature == 0:
        yield ConfigError(
            f"without a temperature, the {section.samples} answers to a prompt are identical",
            code="E7034",
            field="evaluate.samples",
            help="set evaluate.temperature, 0.2 to 0.8 for pass@k, or write samples: 1",
        )
    if section.num_beams > 1 and section.temperature > 0:
        yield ConfigError(
            f"{section.num_beams} beams search for the most probable answer, but a temperature of "
            f"{section.temperature:g} samples one",
            code="E7035",
            field="evaluate.num_beams",
            help="drop either",
        )
    if section.server is not None and not section.server.startswith(("http://", "https://")):
        problem = "a server's URL must begin with http:// or https://"
        yield ConfigError(problem, code="E7036", field="evaluate.server", help="write it as http://HOST:PORT/v1")
    if section.num_beams > 1 and section.server is not None:
        yield ConfigError(
            "OpenAI-compatible servers do not support beam search",
            code="E7037",
            field="evaluate.num_beams",
            help="write num_beams: 1, or answer without evaluate.server",
        )


def _of_ranking(section: EvaluateSection, recipe: TaskRecipe) -> Iterator[ConfigError]:
    for name, neutral in GENERATING.items():
        value = getattr(section, name)
        if value != neutral:
            yield ConfigError(
                f"the recipe {recipe.name} ranks labels in one forward pass without generating, so {name} {value} "
                "has no effect",
                code="E7038",
                field=f"evaluate.{name}",
                help=f"remove evaluate.{name}",
            )
