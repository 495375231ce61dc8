"""The scores of every checkpoint, as the page shows them."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from surefit.evaluate.curve import describe_best_checkpoint, draw_checkpoint_curve
from surefit.report.artefacts import Artefacts
from surefit.report.shapes import CheckpointScores


@dataclass(frozen=True)
class CheckpointsView:
    """What the page draws: the numbers, the picture made of them, and which checkpoint is the best."""

    scores: CheckpointScores
    picture: Markup
    sentence: str


def build_checkpoints_view(found: Artefacts) -> CheckpointsView | None:
    """None where no checkpoint has been scored."""
    scores = found.checkpoints
    if scores is None or scores.best is None or not scores.checkpoints:
        return None
    values = scores.model_dump()
    # The picture escapes every text in it, and all else is a number of ours.
    return CheckpointsView(scores, Markup(draw_checkpoint_curve(values)), describe_best_checkpoint(values["best"]))
