"""`surefit export`, `push` and `serve-check`: from a certified run to a model that other tools load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from surefit.core.rundir import RunDir, read_jsonl
from surefit.core.units import bytes_text, plural, shell_quote, truncate_text
from surefit.stages.evaluating import require_held_out
from surefit.stages.events import record_stage

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.merge.export import CertifiedModel
    from surefit.merge.quantised import Conversion, Outtype
    from surefit.merge.serving import ServingCommands
    from surefit.stages.run_context import CheckedRun

ASKED = 3
"""Number of prompts of the run that a server is asked."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`.

    Attributes:
        format: hub, adapter, nf4, int8, fp8 or gguf.
        output: the folder; by default export/FORMAT in the run.
        outtype, llama_cpp: for GGUF: its weight type, and the llama.cpp folder.
        score: also measure the task's metrics of a conversion.
        dry_run: report what would be written, and write nothing.
    """

    format: str = "hub"
    output: Path | None = None
    outtype: Outtype = "q8_0"
    llama_cpp: Path | None = None
    score: bool = False
    dry_run: bool = False


def export_command(out: Output, target: Path, options: ExportOptions) -> int:
    """Write a run's certified model for others, with its model card."""
    from surefit.merge.export import ADAPTER, HUB, load_certified_model, require_export_directory
    from surefit.stages.run_context import find_run_directory, load_checked_run

    run = load_checked_run(find_run_directory(target).path)
    as_it_is = options.format in (HUB, ADAPTER)
    if options.score and as_it_is:
        raise ConfigError(
            "--score is for conversions", code="E1015", field="--score", help="here the run's own scores hold"
        )
    source = load_certified_model(run.run)
    output = options.output or run.run.exports / options.format
    conversion = None if as_it_is else _conversion(run, source, options)
    require_export_directory(source, output)
    if options.score:
        require_held_out(run.resolved.config, "--score")
    if options.dry_run:
        return _dry_run(out, source, conversion, output, options)
    with run.run.locked("export", out.note), record_stage(run.run, "export"):
        manifest = _export_as_it_is(run, source, output, options.format) if conversion is None else _convert(
            out, run, source, conversion, output, options.score
        )  # fmt: skip
    total = sum(file_record["bytes"] for file_record in manifest["files"].values())
    out.say(f"Exported {plural(len(manifest['files']), 'file')}, {bytes_text(total)} → {output}", "green")
    served_path = run.run.path if options.format == ADAPTER else output  # the run knows the adapter's base model
    out.say(
        f"Next: surefit push {shell_quote(output)} OWNER/NAME --dry-run, "
        f"or surefit serve-check {shell_quote(served_path)}"
    )
    out.result({"output": str(output), **manifest})
    return EXIT_OK


def _conversion(run: CheckedRun, source: CertifiedModel, options: ExportOptions) -> Conversion:
    from surefit.config.schema import ModelSection
    from surefit.merge.quantised import Conversion

    model = run.resolved.config.model
    section = ModelSection(
        name_or_path=str(source.directory), dtype=model.dtype, trust_remote_code=model.trust_remote_code
    )
    return Conversion(options.format, source.directory, section, run.hardware, options.outtype, options.llama_cpp)


def _dry_run(
    out: Output, source: CertifiedModel, conversion: Conversion | None, output: Path, options: ExportOptions
) -> int:
    from surefit.merge.export import ADAPTER, list_adapter_files, list_model_files
    from surefit.merge.quantised import require_convertible

    if conversion is not None:
        require_convertible(conversion)
    parts = list_adapter_files(source) if options.format == ADAPTER else list_model_files(source.directory)
    folder = source.run.adapter if options.format == ADAPTER else source.directory
    files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in parts}
    rows = [[name, bytes_text(size)] for name, size in files.items()]
    out.table(f"From {folder}, certified", ["file", "size"], rows)
    method = "copied as they are" if conversion is None else f"the weights converted by {conversion.how}"
    out.say(f"Would be {method}, with model card, certificate and list of files → {output}; nothing was written")
    out.result({"dry_run": True, "format": options.format, "output": str(output), "files": files})
    return EXIT_OK


def _export_as_it_is(run: CheckedRun, source: CertifiedModel, output: Path, format: str) -> dict[str, Any]:
    from surefit.merge.export import ADAPTER, export_adapter, export_hub
    from surefit.report.model_card import render_model_card

    about = _about(run, format)

    def card(certificate: Mapping[str, Any], directory: Path) -> str:
        return render_model_card(run.run, about, certificate, directory)

    if format == ADAPTER:
        base = run.resolved.config.model.name_or_path
        return export_adapter(source, Path(base).name if Path(base).expanduser().exists() else base, output, card)
    return export_hub(source, output, card)


def _convert(
    out: Output, run: CheckedRun, source: CertifiedModel, conversion: Conversion, output: Path, score: bool
) -> dict[str, Any]:
    from dataclasses import replace

    from surefit.merge.export import export_quantized
    from surefit.report.model_card import render_model_card

    about, score_result = _about(run, conversion.format), {}

    def card(certificate: Mapping[str, Any], directory: Path) -> str:
        if score:
            score_result.update(_score(out, run, conversion, directory))
        return render_model_card(run.run, replace(about, score=score_result or None), certificate, directory)

    with out.progress("exporting") as on_progress:
        on_progress(0, 1, f"converting to {conversion.format}")
        manifest = export_quantized(source, conversion, output, _sequences(run), card)
    _say_measured(out, conversion, output, score_result)
    return manifest | ({"score": score_result} if score_result else {})


def _say_measured(out: Output, conversion: Conversion, output: Path, scored: Mapping[str, Any]) -> None:
    from surefit.core.rundir import read_json
    from surefit.merge.export import CERTIFICATE

    certificate = read_json(output / CERTIFICATE)
    bounds = {c["name"]: f"{c['comparison']} {c['threshold']:.4g}" for c in certificate["checks"]}
    rows = [[name, f"{value:.4g}", bounds.get(name, "")] for name, value in certificate["measured"].items()]
    out.table(f"{conversion.format}, read from disk, against the merged model", ["measured", "value", "bound"], rows)
    if scored:
        lines = [[line["metric"], line["score"], line["difference"]] for line in scored["lines"]]
        title = f"Held-out rows: {scored['n']:,}"
        out.table(title, ["metric", f"{conversion.format}, 95 % interval", "against the merged model"], lines)


def _sequences(run: CheckedRun) -> list[list[int]]:
    """Return the tokenized rows that a conversion is compared on."""
    from surefit.model.saved import load_run_tokenizer
    from surefit.stages.merging import load_comparison_tokens

    return load_comparison_tokens(run, load_run_tokenizer(run.resolved.config.model, run.run))


def _score(out: Output, run: CheckedRun, conversion: Conversion, directory: Path) -> dict[str, Any]:
    """Return a conversion's task metrics on the held-out rows, and their differences to the merged model's."""
    from surefit.data.rows.layouts import read_splits
    from surefit.data.rows.shorten import build_prompt_cutter
    from surefit.data.tokens.dataset import drop_untokenizable, eval_key
    from surefit.evaluate.estimates import compute_estimates
    from surefit.evaluate.generation_settings import list_generation_settings
    from surefit.evaluate.inference import LocalModel
    from surefit.evaluate.rows import predictions_from_answer, score_row, select_eval_rows
    from surefit.merge.quantised import reload_converted
    from surefit.model.tokenizer import load_tokenizer

    config = run.resolved.config
    _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
    model, _ = reload_converted(conversion, directory)
    tokenizer = load_tokenizer(conversion.section)
    usable = drop_untokenizable(held_out, tokenizer, config.data.bad_rows, eval_key(config.data))
    rows = select_eval_rows("eval", usable, config.evaluate.max_examples)
    settings = list_generation_settings(config, run.recipe)[0]
    respondent = LocalModel(model, tokenizer, run.recipe, build_prompt_cutter(config, tokenizer))
    with out.progress("scoring") as on_progress:
        answers = respondent.answer(rows, respondent.prompts(rows), settings, on_progress)
    scores = [
        score_row(run.recipe, example, predictions_from_answer(run.recipe, example, answer), settings.samples)
        for example, answer in zip(rows.examples, answers, strict=True)
    ]
    estimates = compute_estimates(scores, run.recipe)
    differences = _differences_to_merged(run, settings.of(conversion.source.name), rows.where, scores)
    lines = [
        {"metric": name, "score": _interval(e["mean"], *e["ci95"]), "difference": differences.get(name, "–"), **e}
        for name, e in estimates.items()
    ]
    return {"n": len(rows), "primary_metric": run.recipe.primary_metric, "lines": lines}


def _differences_to_merged(
    run: CheckedRun, variant: str, where: Sequence[str], scores: Sequence[dict[str, float]]
) -> dict[str, str]:
    """Return, by metric, the paired difference to the scores that `evaluate` wrote of the merged model; empty without
    them."""
    from surefit.evaluate.paired import paired_differences

    lines = read_jsonl(run.run.eval / "eval" / f"{variant}.predictions.jsonl")
    merged_scores = {line["where"]: line["scores"] for line in lines}
    if set(merged_scores) != set(where):
        return {}
    differences = paired_differences(
        "merged", "converted", [merged_scores[place] for place in where], scores, run.recipe
    )
    return {name: _interval(f.difference, f.low, f.high, "+") for name, f in differences.items()}


def _interval(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _about(run: CheckedRun, format: str) -> Any:
    from surefit.data.read.sources import resolve_source
    from surefit.merge.origin import base_model_name, find_gguf_origin, hub_id, license_of
    from surefit.report.model_card import CardContext

    config = run.resolved.config
    sources = [config.data.train, *config.data.mix]
    datasets = [source.partition(":")[0] for source in sources if resolve_source(source).kind == "hub"]
    name = f"{Path(config.output_dir).name or 'model'}{'' if format == 'hub' else f'-{format}'}"
    model = config.model
    return CardContext(
        name,
        run.recipe,
        hub_id(model),
        base_model_name(model),
        license_of(model),
        datasets,
        format,
        gguf=find_gguf_origin(model),
    )


def push_command(out: Output, target: Path, repo_id: str, public: bool, dry_run: bool) -> int:
    """Upload an export; the repository is private by default."""
    from surefit.merge.export import HUB, MANIFEST
    from surefit.merge.push import prepare_push
    from surefit.merge.push import push_to_hub as upload

    directory = target if (target / MANIFEST).is_file() else RunDir(target).exports / HUB
    if not directory.is_dir():
        help_text = f"`surefit export {shell_quote(target)}` makes one"
        raise ConfigError(
            "no export is here, and no run with one in export/hub", code="E1016", path=target, help=help_text
        )
    upload_plan = prepare_push(directory, repo_id, private=not public)
    rows = [[name, bytes_text(size)] for name, size in upload_plan.files.items()]
    kind = "public" if public else "private"
    out.table(f"{directory} → {repo_id} ({kind} where it is made now)", ["file", "size"], rows)
    if upload_plan.left_behind:
        out.note(f"stays here, as it is no part of the export: {', '.join(upload_plan.left_behind)}")
    result = {"repo_id": repo_id, "private": not public, "files": upload_plan.files, "bytes": upload_plan.bytes}
    if dry_run:
        out.say(f"{plural(len(rows), 'file')}, {bytes_text(upload_plan.bytes)}; nothing was sent")
        out.result(result | {"dry_run": True, "url": None})
        return EXIT_OK
    with out.progress("pushing") as on_progress:
        address = upload(upload_plan, on_progress)
    out.say(f"Pushed {plural(len(rows), 'file')}, {bytes_text(upload_plan.bytes)} → {address}", "green")
    out.result(result | {"dry_run": False, "url": address})
    return EXIT_OK


def serve_check_command(out: Output, target: Path, url: str | None, model: str | None) -> int:
    """Print the commands that serve a model; with a URL, compare the server's answers with the run's."""
    from surefit.merge.serving import build_serving_commands

    serving = build_serving_commands(target)
    for name, value in serving.facts.items():
        out.say(f"{name}: {value}")
    for name, commands in serving.commands.items():
        out.say(f"\n{name}", "bold")
        for line in commands:
            out.say(line)
    for line in serving.notes:
        out.note(line)
    result = {"facts": serving.facts, "commands": serving.commands, "notes": serving.notes, "answers": None}
    if url is None:
        out.result(result)
        return EXIT_OK
    answers = _smoke_test(out, serving, url, model)
    matches = sum(answer["same"] for answer in answers)
    all_nonempty = all(answer["text"].strip() for answer in answers)
    ok = all_nonempty and matches > 0
    out.say(f"{matches} of {plural(len(answers), 'answer')} as the run has them", "green" if ok else "red")
    if not ok:
        out.say("Not one is: see that the server has this model, its chat template and its stop tokens", "red")
    out.result(result | {"answers": answers, "same": matches})
    return EXIT_OK if ok else EXIT_FINDINGS


def _smoke_test(out: Output, found: ServingCommands, url: str, model: str | None) -> list[dict[str, Any]]:
    """Send a few rows of the run to the server with greedy decoding, and compare the answers with the run's."""
    from surefit.core.sampling import evenly_spaced_indices
    from surefit.data.rows.layouts import read_splits
    from surefit.evaluate.answers import read_run
    from surefit.evaluate.generation_settings import GenerationSettings
    from surefit.evaluate.inference import ServerModel
    from surefit.evaluate.rows import select_eval_rows
    from surefit.generate.engine import DecodingConfig
    from surefit.generate.server import ServedModel
    from surefit.stages.run_context import load_checked_run

    if found.run is None:
        raise ConfigError(
            "an export has no prompts of its own", code="E1017", field="--url", help="name the run that it was made of"
        )
    run = load_checked_run(found.run.path)
    config = run.resolved.config
    require_held_out(config, "--url")
    answers_of_run = {line["where"]: line for line in read_run(str(found.run.path), "eval").lines}
    _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
    rows = select_eval_rows("eval", held_out, None)
    candidates = [
        place
        for place, where in enumerate(rows.where)
        if where in answers_of_run and not answers_of_run[where]["truncated"]
    ]
    sampled_rows = rows.subset([candidates[i] for i in evenly_spaced_indices(len(candidates), ASKED)])
    respondent = ServerModel(
        ServedModel(url, model, field="--url", switches=config.evaluate.chat_template_kwargs), run.recipe
    )
    settings = GenerationSettings(DecodingConfig(config.evaluate.max_new_tokens, ASKED, stop=tuple(run.recipe.stop)))
    with out.progress("asking") as on_progress:
        answers = respondent.answer(sampled_rows, respondent.prompts(sampled_rows), settings, on_progress)
    lines = []
    for where, answer in zip(sampled_rows.where, answers, strict=True):
        text, expected = answer.generations[0].text, str(answers_of_run[where]["text"])
        is_same = text.strip() == expected.strip()
        lines.append({"where": where, "same": is_same, "text": text, "expected": expected})
        out.say(f"{where}: {'same' if is_same else 'DIFFERENT'}", None if is_same else "yellow")
        if not is_same:
            out.say(f"  the run: {truncate_text(expected, 200)}\n  served:  {truncate_text(text, 200)}")
    return lines
