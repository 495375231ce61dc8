"""The verb `export`: from a certified run to a model that other tools load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from surefit.cli.exits import verb
from surefit.cli.options import Target
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.rundir import read_json, read_jsonl, write_atomic
from surefit.core.units import bytes_text, plural, shell_quote

if TYPE_CHECKING:
    from surefit.merge.export import CertifiedModel
    from surefit.merge.modelfile import OllamaSettings
    from surefit.merge.quantised import Conversion, Outtype
    from surefit.stages.run_context import CheckedRun


@verb
def export(
    out: Output,
    target: Target,
    format: Annotated[
        Literal["hub", "adapter", "nf4", "int8", "fp8", "gguf"] | None,
        typer.Option("--format", help="hub, the default: the merged weights as they are; adapter: without the base."),
    ] = None,
    target_tool: Annotated[
        Literal["ollama"] | None, typer.Option("--for", help="ollama: a GGUF file and a Modelfile for it.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: export/FORMAT in the run.")] = None,
    outtype: Annotated[
        Literal["f16", "bf16", "q8_0", "q4_k_m"], typer.Option(help="Data type of a GGUF file.")
    ] = "q8_0",
    llama_cpp: Annotated[
        Path | None, typer.Option("--llama-cpp", metavar="DIR", help="A checkout of llama.cpp; default: LLAMA_CPP.")
    ] = None,
    score: Annotated[bool, typer.Option("--score", help="Measure the task's metrics of a conversion too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made; write nothing.")] = False,
) -> int:
    """Write the certified model for others: model card, certificate, and the weights as they are or in fewer bits."""
    from surefit.merge.export import load_certified_model, require_export_directory
    from surefit.merge.export_manifest import ADAPTER, HUB
    from surefit.stages.evaluating import require_held_out
    from surefit.stages.events import record_stage
    from surefit.stages.run_context import find_run_directory, load_checked_run

    if target_tool and format not in (None, "gguf"):
        raise ConfigError(
            f"--for {target_tool} writes GGUF, not {format}", code="E1971", field="--format", help="leave --format out"
        )
    format = "gguf" if target_tool else format or "hub"
    run = load_checked_run(find_run_directory(target).path)
    as_it_is = format in (HUB, ADAPTER)
    if score and as_it_is:
        raise ConfigError(
            "--score is for conversions", code="E1015", field="--score", help="here the run's own scores hold"
        )
    source = load_certified_model(run.run)
    output = output or run.run.exports / (target_tool or format)
    conversion = None if as_it_is else _conversion(run, source, format, outtype, llama_cpp)
    require_export_directory(source, output)
    ollama = _ollama_settings(out, run, conversion) if conversion and target_tool else None
    if score:
        require_held_out(run.resolved.config, "--score")
    if dry_run:
        return _dry_run(out, source, conversion, output, format)
    with run.run.locked("export", out.note), record_stage(run.run, "export"):
        if conversion is None:
            manifest = _export_as_it_is(run, source, output, format)
        else:
            manifest = _convert(out, run, source, conversion, output, score, ollama)
    total = sum(file_record["bytes"] for file_record in manifest["files"].values())
    out.say(f"Exported {plural(len(manifest['files']), 'file')}, {bytes_text(total)} → {output}", "green")
    served_path = run.run.path if format == ADAPTER else output  # the run knows the adapter's base model
    if ollama:
        name = re.sub(r"[^a-z0-9._-]+", "-", run.run.path.name.lower()).strip("-._") or "model"
        modelfile = shell_quote(output / "Modelfile")
        out.say(f"Next: ollama create {name} -f {modelfile}, then ollama run {name}")
    else:
        out.say(
            f"Next: surefit push {shell_quote(output)} OWNER/NAME --dry-run, "
            f"or surefit serve-check {shell_quote(served_path)}"
        )
    out.result({"output": str(output), **manifest})
    return EXIT_OK


def _conversion(
    run: CheckedRun, source: CertifiedModel, format: str, outtype: Outtype, llama_cpp: Path | None
) -> Conversion:
    from surefit.config.schema import ModelSection
    from surefit.merge.quantised import Conversion

    model = run.resolved.config.model
    section = ModelSection(
        name_or_path=str(source.directory), dtype=model.dtype, trust_remote_code=model.trust_remote_code
    )
    return Conversion(format, source.directory, section, run.hardware, outtype, llama_cpp)


def _dry_run(out: Output, source: CertifiedModel, conversion: Conversion | None, output: Path, format: str) -> int:
    from surefit.merge.export import list_adapter_files, list_model_files
    from surefit.merge.export_manifest import ADAPTER
    from surefit.merge.quantised import require_convertible

    if conversion is not None:
        require_convertible(conversion)
    parts = list_adapter_files(source) if format == ADAPTER else list_model_files(source.directory)
    folder = source.run.adapter if format == ADAPTER else source.directory
    files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in parts}
    rows = [[name, bytes_text(size)] for name, size in files.items()]
    out.table(f"From {folder}, certified", ["file", "size"], rows)
    method = "copied as they are" if conversion is None else f"the weights converted by {conversion.how}"
    out.say(f"Would be {method}, with model card, certificate and list of files → {output}; nothing was written")
    out.result({"dry_run": True, "format": format, "output": str(output), "files": files})
    return EXIT_OK


def _export_as_it_is(run: CheckedRun, source: CertifiedModel, output: Path, format: str) -> dict[str, Any]:
    from surefit.merge.export import export_adapter, export_hub
    from surefit.merge.export_manifest import ADAPTER
    from surefit.report.model_card import render_model_card

    about = _about(run, format)

    def card(certificate: Mapping[str, Any], directory: Path) -> str:
        return render_model_card(run.run, about, certificate, directory)

    if format == ADAPTER:
        base = run.resolved.config.model.name_or_path
        return export_adapter(source, Path(base).name if Path(base).expanduser().exists() else base, output, card)
    return export_hub(source, output, card)


def _ollama_settings(out: Output, run: CheckedRun, conversion: Conversion) -> OllamaSettings:
    """Return what the Modelfile says, before the weights are converted: the chat template may not be possible."""
    from surefit.facts.tokenizer import GENERATION_CONFIG
    from surefit.merge.modelfile import OllamaSettings, quoted_texts, require_turn_texts
    from surefit.model.tokenizer import load_tokenizer

    config = run.resolved.config
    tokenizer = load_tokenizer(conversion.section)
    system, number = _only_system_prompt(run)
    if number > 1:
        out.say("The Modelfile has no SYSTEM: the training rows have different system prompts, or some have none")
    generation = conversion.source / GENERATION_CONFIG
    ids = read_json(generation).get("eos_token_id") if generation.is_file() else None
    ids = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    tokens = [str(tokenizer.convert_ids_to_tokens(number)) for number in ids if number is not None]
    settings = OllamaSettings(
        texts=require_turn_texts(tokenizer, str(conversion.source)),
        bos=tokenizer.bos_token,
        system=system,
        stops=[*tokens, *run.recipe.stop],
        max_length=config.data.max_length,
        temperature=config.evaluate.temperature,
    )
    quoted_texts(settings, str(run.run.path))
    return settings


def _only_system_prompt(run: CheckedRun) -> tuple[str | None, int]:
    """Return the system prompt that all training rows have, None where they have none or several; and how many
    different ones there are, none at all counted as one."""
    from surefit.data.rows.layouts import read_splits

    config = run.resolved.config
    train, _ = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
    first = [example.prompt[0] if example.prompt else {} for example in train]
    prompts = {turn.get("content") if turn.get("role") == "system" else None for turn in first}
    number = len(prompts)
    only = prompts.pop() if number == 1 else None
    return (only if isinstance(only, str) else None), number


def _convert(
    out: Output,
    run: CheckedRun,
    source: CertifiedModel,
    conversion: Conversion,
    output: Path,
    score: bool,
    ollama: OllamaSettings | None,
) -> dict[str, Any]:
    from surefit.merge.export import export_quantized
    from surefit.report.model_card import render_model_card

    about, score_result = _about(run, conversion.format), {}

    def card(certificate: Mapping[str, Any], directory: Path) -> str:
        if score:
            score_result.update(_score(out, run, conversion, directory))
        return render_model_card(run.run, replace(about, score=score_result or None), certificate, directory)

    def write_beside(directory: Path) -> None:
        if ollama:
            from surefit.facts.gguf import read_gguf
            from surefit.merge.modelfile import MODELFILE, modelfile_text
            from surefit.merge.quantised import GGUF_FILE

            text = modelfile_text(ollama, GGUF_FILE, read_gguf(directory / GGUF_FILE))
            write_atomic(directory / MODELFILE, text)

    with out.progress("exporting") as on_progress:
        on_progress(0, 1, f"converting to {conversion.format}")
        manifest = export_quantized(source, conversion, output, _sequences(run), card, write_beside)
    _say_measured(out, conversion, output, score_result)
    return manifest | ({"score": score_result} if score_result else {})


def _say_measured(out: Output, conversion: Conversion, output: Path, scored: Mapping[str, Any]) -> None:
    from surefit.merge.export_manifest import CERTIFICATE

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
    from surefit.evaluate.rows import predictions_from_answers, score_rows, select_eval_rows
    from surefit.merge.quantised import reload_converted
    from surefit.model.tokenizer import load_tokenizer

    config = run.resolved.config
    _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
    model, _ = reload_converted(conversion, directory)
    tokenizer = load_tokenizer(conversion.section)
    usable = drop_untokenizable(held_out, tokenizer, config.data.bad_rows, eval_key(config.data))
    rows = select_eval_rows("eval", usable, config.evaluate.max_examples)
    settings = list_generation_settings(config, run.recipe)[0]
    cut = build_prompt_cutter(config, tokenizer)
    respondent = LocalModel(model, tokenizer, run.recipe, cut, config.data.max_length)
    prompts = respondent.prompts(rows)
    with out.progress("scoring") as on_progress:
        answers = respondent.answer(rows, prompts, settings, on_progress)
    scores = score_rows(run.recipe, rows, predictions_from_answers(run.recipe, rows, answers))
    if run.recipe.measures_likelihood:
        likelihoods = respondent.likelihoods(rows, prompts, settings).scores
        scores = [row | likelihood for row, likelihood in zip(scores, likelihoods, strict=True)]
    estimates = compute_estimates(scores, run.recipe)
    differences = _differences_to_merged(run, settings.of(conversion.source.name), rows.where, scores)
    lines = [
        {"metric": name, "score": _interval(e.mean, e.low, e.high), "difference": differences.get(name, "–")}
        | e.document()
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
