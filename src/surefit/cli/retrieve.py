"""The verb `retrieve`: turn a data set of ratings or reviews into rows that a language model ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK
from surefit.core.units import duration_text, plural

SHOWN = ("recall@5", "recall@10", "recall@20", "mrr@10", "ndcg@5", "ndcg@10", "ndcg@20")


@verb
def retrieve(
    out: Output,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="MovieLens or reviews: the file, or its directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory for rows, candidates and manifest.")],
    retriever: Annotated[str, typer.Option(help="blend, lrurec, popularity, markov or window5.")] = "blend",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the training and of the wrong candidates.")] = 0,
    train_rows: Annotated[int, typer.Option(min=1, help="Rows for the ranker to learn from, at most.")] = 10_000,
    candidates: Annotated[int, typer.Option(min=2, max=26, help="Titles to choose from in each row.")] = 20,
    history: Annotated[int, typer.Option(min=1, max=500, help="Titles of a user's history in each row.")] = 20,
    core: Annotated[int, typer.Option(min=3, help="Events that each user and each item must have.")] = 5,
) -> int:
    """Make rows for recipe rec_ranking: find candidates for every user, with a retriever that is trained here."""
    from surefit.retrieval.stage import RetrievalOptions, run_retrieval

    options = RetrievalOptions(data, output, retriever, seed, train_rows, core, candidates, history)
    with out.progress(f"training {retriever}") as on_progress:
        manifest = run_retrieval(options, on_progress)
    _say(out, manifest)
    rows = {name: written["rows"] for name, written in manifest["written"].items()}
    out.say(
        f"Wrote {output}: {plural(rows['train'], 'training row')}, and in valid.jsonl and test.jsonl a row for each of "
        f"{plural(rows['test'], 'user')}"
    )
    out.result({**manifest, "output": str(output)})
    return EXIT_OK


def _say(out: Output, manifest: dict[str, Any]) -> None:
    data, retriever = manifest["data"], manifest["retriever"]
    for note in data["notes"]:
        out.say(f"note: {note}", "yellow")
    name = data["vintage"] or f"{data['name']}: {plural(data['events'], 'event')}"
    out.say(name)
    out.say(
        f"kept {data['users']:,} users, {data['items']:,} items, {data['interactions']:,} interactions; "
        f"{data['users_with_tied_last_two']:,} users have their last two events at one time"
    )
    scores = {retriever["name"]: manifest["scores"]["test"]} | {
        name: values for name, values in manifest["baselines"].items() if name != retriever["name"]
    }
    rows = [[name, *(f"{values[metric]:.4f}" for metric in SHOWN)] for name, values in scores.items()]
    out.table("Test items, all users, all items ranked", ["retriever", *SHOWN], rows)
    hits = manifest["within_candidates"]["test"]
    out.say(
        f"{hits:,} of {data['users']:,} right items are among the {manifest['settings']['candidates']} candidates: "
        "more than these no ranker can find"
    )
    if "best_step" in retriever:
        out.say(
            f"{retriever['name']}: trained for {retriever['steps']:,} steps in {duration_text(retriever['seconds'])}; "
            f"step {retriever['best_step']:,} was best on the validation items"
        )
