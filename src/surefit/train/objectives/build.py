"""The objective of a config."""

from __future__ import annotations

from surefit.config.schema import ObjectiveSection
from surefit.train.objectives.labels import LabelObjective
from surefit.train.objectives.pairs import PairObjective
from surefit.train.step import CROSS_ENTROPY, Objective


def build_objective(section: ObjectiveSection) -> Objective:
    """Return the objective of a resolved section."""
    if section.labelled:
        return LabelObjective(section)
    return PairObjective(section) if section.paired else CROSS_ENTROPY
