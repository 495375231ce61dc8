"""The retrievers by name, and the baselines that every report includes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefit.core.progress import OnProgress, ignore_progress
from surefit.retrieval.blend import select_blend
from surefit.retrieval.interactions import Interactions
from surefit.retrieval.markov import CoOccurrence, Popularity
from surefit.retrieval.ranking import Retriever


@dataclass(frozen=True)
class TrainedRetriever:
    """A retriever, and the settings and seconds of its training."""

    retriever: Retriever
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def _popularity(interactions: Interactions) -> Retriever:
    return Popularity(interactions.trained, len(interactions.items))


def _markov(interactions: Interactions) -> Retriever:
    return CoOccurrence(interactions.trained, len(interactions.items), weights=(1.0,), recent=(1.0,))


def _window(interactions: Interactions) -> Retriever:
    near = tuple(1 / apart for apart in range(1, 6))
    return CoOccurrence(interactions.trained, len(interactions.items), weights=near, recent=(1.0,) * 5)


BASELINES: dict[str, Callable[[Interactions], Retriever]] = {
    "popularity": _popularity,
    "markov": _markov,
    "window5": _window,
}
"""Retrievers that only count: the most popular items; items after the last item; items within five places of the last
five."""
DEFAULT = "blend"
NAMES = (DEFAULT, "lrurec", *BASELINES)
BLENDED = "window5"
"""The baseline that `blend` combines with LRURec."""


def build_retriever(
    name: str,
    interactions: Interactions,
    seed: int = 0,
    checkpoint: Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> TrainedRetriever:
    """Build a retriever for these interactions.

    Args:
        name: one of `NAMES`.
        seed: seed of a trained one.
        checkpoint: file of a trained one, which is resumed from it.
    """
    if name in BASELINES:
        return TrainedRetriever(BASELINES[name](interactions))
    import torch

    from surefit.retrieval.fitting import FitSettings, build_manifest_settings, fit_lrurec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fitted = fit_lrurec(
        interactions, FitSettings(seed=seed), device=device, checkpoint=checkpoint, on_progress=on_progress
    )
    if name == "lrurec":
        return TrainedRetriever(fitted.retriever, build_manifest_settings(fitted), fitted.seconds)
    retriever, scores_by_share = select_blend(interactions, fitted.retriever, BASELINES[BLENDED](interactions))
    blended = {"share_of_counts": retriever.share, "valid_ndcg@10_by_share": scores_by_share}
    return TrainedRetriever(retriever, build_manifest_settings(fitted) | blended, fitted.seconds)
