"""The scores of every checkpoint, as the page shows them."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from surefit.evaluate.curve import describe_best_checkpoint, draw_checkpoint_curve
from surefit.report.artefacts import Artefacts
from surefit.report.shapes import CheckpointScores


@dataclass(frozen=True)
class CheckpointsView:
    """Scores of the checkpoints, their plot, and a sentence about the best one."""

    scores: CheckpointScores
    picture: Markup
    sentence: str


def build_checkpoints_view(found: Artefacts) -> CheckpointsView | None:
    """Build the checkpoints' part of the page; None if no checkpoint has been scored."""
    scores = found.checkpoints
    if scores is None or scores.best is None or not scores.checkpoints:
        return None
    values = scores.model_dump()
    # The plot escapes every text in it, and everything else is a number.
    return CheckpointsView(scores, Markup(draw_checkpoint_curve(values)), describe_best_checkpoint(values["best"]))
