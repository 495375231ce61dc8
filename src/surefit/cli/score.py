"""The verb `score`: score any predictions against any references, with a recipe's scorer and no model. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.intervals import interval_text
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK
from surefit.core.output import json_lines_with, output_file
from surefit.core.rundir import write_atomic
from surefit.core.units import plural


@verb
def score(
    out: Output,
    predictions: Annotated[str, typer.Option(metavar="FILE", help="Answers: JSONL, JSON, CSV, Parquet or text lines.")],
    references: Annotated[str, typer.Option(metavar="FILE", help="Gold rows, laid out as the recipe's data.")],
    recipe: Annotated[str, typer.Option(metavar="NAME", help="Whose scorer, e.g. function_calling.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the scores of every row here.")] = None,
) -> int:
    """Score any predictions with a recipe's scorer: no model, no run."""
    from surefit import recipes
    from surefit.config.inputs import row_files
    from surefit.evaluate.scoring import score_files

    scorer = recipes.get_recipe(recipe)
    if output is not None:
        inputs = row_files("the predictions", predictions) | row_files("the references", references)
        output_file(output, inputs, as_rows=True, earlier=json_lines_with("index", "text", "scores"))
    with out.progress("scoring") as on_progress:
        scored = score_files(scorer, predictions, references, on_progress)
    record = scored.record
    if output is not None:
        write_atomic(output, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in scored.lines))
    _say(out, record)
    if output is not None:
        out.say(f"Wrote {output}: the scores of every row; `surefit compare` takes it")
    out.result({**record, "output": str(output) if output else None})
    return EXIT_OK


def _say(out: Output, record: dict[str, Any]) -> None:
    primary, baselines = record["primary_metric"], record["baselines"]
    columns = {"predictions": record["metrics"], **baselines}
    metrics = sorted(record["metrics"], key=lambda metric: metric != primary)
    rows = [
        [
            metric,
            *(interval_text(column.get(metric)) for column in columns.values()),
            str(record["metrics"][metric]["n"]),
        ]
        for metric in metrics
    ]
    title = f"{record['recipe']} (scorer version {record['recipe_version']}), 95 % intervals"
    out.table(title, ["metric", *columns, "rows"], rows)
    if record["reason"]:
        out.note(record["reason"])
    total = "" if record["n"] == record["references"] else f" of {record['references']:,}"
    out.say(
        f"{plural(record['n'], 'row')}{total}, matched by {record['matched_by']}; {record['unparsed']} did not parse, "
        f"{record['truncated']} truncated: each counts as a row"
    )
