"""`surefit score`: score any predictions against any references, with a recipe's scorer and no model. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.config.inputs import row_files
from surefit.core.errors import EXIT_OK
from surefit.core.output import json_lines_with, output_file
from surefit.core.rundir import write_atomic
from surefit.core.units import plural

if TYPE_CHECKING:
    from surefit.cli.render import Output


def score_command(out: Output, recipe_name: str, predictions: str, references: str, output: Path | None) -> int:
    """Score predictions, print the metrics, and write the scores of each row."""
    from surefit import recipes
    from surefit.evaluate.scoring import score_files

    recipe = recipes.get_recipe(recipe_name)
    if output is not None:
        inputs = row_files("the predictions", predictions) | row_files("the references", references)
        output_file(output, inputs, as_rows=True, earlier=json_lines_with("index", "text", "scores"))
    with out.progress("scoring") as on_progress:
        scored = score_files(recipe, predictions, references, on_progress)
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
    total = "" if record["n"] == record["references"] else f" of {record['references']:,}"
    out.say(
        f"{plural(record['n'], 'row')}{total}, matched by {record['matched_by']}; {record['unparsed']} did not parse, "
        f"{record['truncated']} truncated: each counts as a row"
    )


def interval_text(value: dict[str, Any] | None) -> str:
    """Return a mean with its interval."""
    if value is None:
        return "-"
    low, high = value["ci95"]
    return f"{value['mean']:.3f} [{low:.3f}, {high:.3f}]"
