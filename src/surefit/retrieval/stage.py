"""The retrieval stage end to end: read a data set, build a retriever, write candidates and rows for the ranker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from surefit.core.errors import ConfigError, did_you_mean
from surefit.core.output import json_with, output_file
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.rundir import file_sha256, write_atomic, write_json
from surefit.metrics.ranking import mean_ranking
from surefit.retrieval.candidates import RankerRows, candidate_lines
from surefit.retrieval.interactions import Interactions, Numbering, build_interactions
from surefit.retrieval.ranking import Ranking, Retriever, rank_items
from surefit.retrieval.retrievers import BASELINES, DEFAULT, NAMES, build_retriever
from surefit.retrieval.sources import detect_movielens_release, read_events

SPLITS: tuple[Literal["valid", "test"], ...] = ("valid", "test")
WRITTEN = ("candidates.jsonl", "train.jsonl", "valid.jsonl", "test.jsonl", "manifest.json", "retriever.pt")


@dataclass(frozen=True)
class RetrievalOptions:
    """The options of `surefit retrieve`.

    Attributes:
        data: a data set (`sources.read_events`).
        output: the directory that is written.
        retriever: one of `retrievers.NAMES`.
        seed: seed of a trained retriever, and of the ranker's training rows.
        train_rows: the most training rows for the ranker.
        core: the fewest events of a user and of an item.
        candidates: titles in a row.
        history: the most titles of a user's history in a row.
        numbering: numbering of the items (`interactions.Numbering`).
    """

    data: Path
    output: Path
    retriever: str = DEFAULT
    seed: int = 0
    train_rows: int = 10_000
    core: int = 5
    candidates: int = 20
    history: int = 20
    numbering: Numbering = "sorted"

    def __post_init__(self) -> None:
        if self.retriever not in NAMES:
            raise ConfigError(
                f"there is no retriever {self.retriever!r}{did_you_mean(self.retriever, NAMES)}",
                code="E7155",
                field="retriever",
                help=f"there are {', '.join(NAMES)}",
            )
        if not 2 <= self.candidates <= 26:
            problem = f"{self.candidates} candidates: each needs its own letter"
            raise ConfigError(problem, code="E7156", field="candidates", help="use 2 to 26")


def run_retrieval(asked: RetrievalOptions, on_progress: OnProgress = ignore_progress) -> dict[str, Any]:
    """Run the whole retrieval stage.

    Writes candidates.jsonl (the retrieved items, with the data set's keys), train.jsonl, valid.jsonl and test.jsonl
    (rows of `recipe: rec_ranking`) and, last, manifest.json. A trained retriever is kept in retriever.pt: the same call
    resumes it, finished or not.

    Returns:
        The manifest.

    Raises:
        ConfigError, DataError, MachineError: the options, the data set, or the machine is not usable.
    """
    require_retrieval_directory(asked)
    events = read_events(asked.data)
    interactions = build_interactions(events, asked.core, asked.numbering)
    trained = build_retriever(asked.retriever, interactions, asked.seed, asked.output / "retriever.pt", on_progress)
    rankings = {split: _ranked(trained.retriever, interactions, split, asked.candidates) for split in SPLITS}
    rows = RankerRows(interactions, asked.candidates, asked.history, asked.seed)
    outputs: dict[str, list[dict[str, Any]]] = {
        "candidates": [line for split in SPLITS for line in candidate_lines(interactions, split, rankings[split])],
        "train": list(rows.train(asked.train_rows)),
        **{split: list(rows.scored(split, rankings[split])) for split in SPLITS},
    }
    files = {name: _write(asked.output / f"{name}.jsonl", lines) for name, lines in outputs.items()}
    manifest = {
        "data": {
            "name": events.name,
            "vintage": detect_movielens_release(asked.data),
            "notes": list(events.notes),
            "files": {path.name: file_sha256(path) for path in events.files},
            "events": len(events.users),
            "without_title": interactions.without_title,
            **interactions.counts(),
        },
        "retriever": {"name": asked.retriever, "seconds": trained.seconds, **trained.settings},
        "settings": {key: value for key, value in asdict(asked).items() if key not in ("data", "output", "retriever")},
        "scores": {split: mean_ranking(rankings[split].ranks.tolist()) for split in SPLITS},
        "baselines": baseline_scores(interactions),
        "within_candidates": {split: sum(bool(row["answer"]) for row in outputs[split]) for split in SPLITS},
        "written": files,
    }
    write_json(asked.output / "manifest.json", manifest)
    return manifest


def require_retrieval_directory(asked: RetrievalOptions) -> None:
    """Raise if the output directory cannot be written.

    Raises:
        ConfigError: a file that would be written exists, and is not from an earlier call; or it is the data set.
    """
    if asked.output.exists() and not asked.output.is_dir():
        raise ConfigError("is a file", code="E7600", path=asked.output, field="--output", help="name a directory")
    manifest, checkpoint = asked.output / "manifest.json", asked.output / "retriever.pt"
    # A killed call leaves its trained retriever, which is resumed, and no manifest yet.
    is_ours = json_with("retriever", "written")(manifest) or checkpoint.is_file()
    for name in WRITTEN:
        output_file(asked.output / name, {"the data set": asked.data}, as_rows=True, earlier=lambda _: is_ours)


def _ranked(
    retriever: Retriever, interactions: Interactions, split: Literal["valid", "test"], candidates: int
) -> Ranking:
    return rank_items(retriever, *interactions.questions(split), k=candidates)


def baseline_scores(interactions: Interactions) -> dict[str, dict[str, float]]:
    """Return baseline → its mean scores on the test items."""
    retrievers = {name: baseline(interactions) for name, baseline in BASELINES.items()}
    return {
        name: mean_ranking(_ranked(retriever, interactions, "test", 1).ranks.tolist())
        for name, retriever in retrievers.items()
    }


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Write rows; return their number, and the file's hash."""
    rows = [json.dumps(line, ensure_ascii=False) for line in lines]
    write_atomic(path, "".join(f"{row}\n" for row in rows))
    return {"rows": len(rows), "sha256": file_sha256(path)}
