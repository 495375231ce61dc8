"""`surefit retrieve`: turn a data set of ratings or reviews into rows that a language model ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.core.errors import EXIT_OK
from surefit.core.units import duration_text, plural

if TYPE_CHECKING:
    from surefit.cli.render import Output

SHOWN = ("recall@5", "recall@10", "recall@20", "mrr@10", "ndcg@5", "ndcg@10", "ndcg@20")


def retrieve_command(out: Output, data: Path, output: Path, **asked: Any) -> int:
    """Train the retriever, write the rows, and print the retrieval scores."""
    from surefit.retrieval.stage import RetrievalOptions
    from surefit.retrieval.stage import run_retrieval as run

    request = RetrievalOptions(data, output, **asked)
    with out.progress(f"training {request.retriever}") as on_progress:
        manifest = run(request, on_progress)
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
