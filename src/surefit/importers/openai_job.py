"""OpenAI's fine-tuning job: the `fine_tuning.job` object that its API returns, or the request that creates one."""

from __future__ import annotations

import re

from surefit.importers import convert as c
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.known import key_set

MODEL = "Qwen/Qwen2.5-7B-Instruct"
"""The open model that stands in for OpenAI's, which cannot be downloaded."""
ROWS = "train.jsonl"
_HYPERPARAMETERS = ("hyperparameters", "method.supervised.hyperparameters")
_FILE_ID = re.compile(r"file-[\w-]+")


def _number_or_auto(convert: c.Convert) -> c.Convert:
    return lambda value: value if value == "auto" else convert(value)


KEYS = {
    "seed": KeyMapping(c.to_int, "train.seed"),
    **{
        f"{section}.{name}": mapping
        for section in _HYPERPARAMETERS
        for name, mapping in (
            ("n_epochs", KeyMapping(_number_or_auto(c.to_float), "train.num_train_epochs")),
            ("batch_size", KeyMapping(_number_or_auto(c.to_int), "train.global_batch_size")),
        )
    },
}
KNOWN = key_set("""
    id object created_at finished_at estimated_finish model fine_tuned_model organization_id project_id result_files
    status training_file validation_file trained_tokens error integrations suffix user_provided_suffix metadata
    usage_metrics shared_with_openai eval_id method.type
""") | frozenset(f"{section}.learning_rate_multiplier" for section in _HYPERPARAMETERS)  # fmt: skip
RECORDS = key_set("""
    id object created_at finished_at estimated_finish organization_id project_id result_files status trained_tokens
    error usage_metrics shared_with_openai eval_id
""")
"""Keys that record the job and set nothing."""


def _drop_repeated(draft: ConfigDraft) -> None:
    """Leave out the older of two sections where it repeats the newer one, as in every job that the API returns."""
    older, newer = _HYPERPARAMETERS
    for key in [key for key in draft.flat if key.startswith(f"{older}.")]:
        if draft.flat[key] == draft.flat.get(key.replace(older, newer, 1)):
            del draft.flat[key]
            draft.mapped.discard(key)
            draft.lost.pop(key, None)


def _say_conflicts(draft: ConfigDraft) -> None:
    """Name each value of the older section that the newer one contradicts; the newer one counts, in any order."""
    older, newer = _HYPERPARAMETERS
    for key in [key for key in KEYS if key.startswith(f"{older}.") and draft.says(key)]:
        other = key.replace(older, newer, 1)
        if draft.says(other):
            why = f"{other} is {draft.flat[other]}, and OpenAI's newer section counts"
            draft.lose_part(key, "", draft.flat[key], why)
            mapping = KEYS.get(other)
            if mapping is not None and mapping.config is not None and other not in draft.refused:
                draft.carry(mapping.config, mapping.read(draft.flat[other]), other)


def _finish(draft: ConfigDraft) -> None:
    _drop_repeated(draft)
    _say_conflicts(draft)
    for key in [key for key in draft.flat if key.partition(".")[0] in RECORDS and draft.says(key)]:
        draft.lose(key, "it records the job at OpenAI")
    others = ("method.dpo", "method.reinforcement")
    other = next((key for key in draft.flat if key.startswith(others) and draft.says(key)), None)
    kind = draft.flat.get("method.type") or (other.split(".")[1] if other else "supervised")
    if kind != "supervised":
        draft.whole_run = False
        draft.refuse_with(
            "method.type" if draft.says("method.type") else str(other),
            f"a job of the method {kind}: SureFit trains on answers, not on preferences or rewards",
            "train on the preferred answers as messages: `surefit init --data ROWS`",
        )
        return
    if draft.says("method.type"):
        draft.reach("method.type")
    for section in _HYPERPARAMETERS:
        draft.lose(
            f"{section}.learning_rate_multiplier",
            "not comparable: it multiplies a rate that OpenAI does not publish; train.learning_rate stays SureFit's",
        )
    _model(draft)
    _files(draft)
    suffix = next((key for key in ("user_provided_suffix", "suffix") if draft.says(key)), None)
    name = re.sub(r"[^\w.-]+", "-", str(draft.flat[suffix])).strip("-.") if suffix else ""
    draft.carry("output_dir", f"runs/{name or 'openai'}", suffix or "")
    if suffix:
        draft.reach(suffix)


def _model(draft: ConfigDraft) -> None:
    if draft.says("model"):
        draft.carry("model.name_or_path", MODEL, "model")
        draft.reach("model")
        draft.lose_part(
            "model",
            "",
            draft.flat["model"],
            f"OpenAI's models cannot be downloaded: {MODEL} stands in, choose your own",
        )
    if draft.says("fine_tuned_model"):
        draft.lose("fine_tuned_model", "its weights stay at OpenAI")


def _files(draft: ConfigDraft) -> None:
    """Carry the names of files; an id of an uploaded file names nothing here."""
    for key, dotted, without in (
        ("training_file", "data.train", f"its JSONL: {ROWS} stands for it"),
        ("validation_file", "data.eval", "its JSONL; until then 2 % of the training rows are held out"),
    ):
        if not draft.says(key):
            continue
        value = draft.flat[key]
        if not isinstance(value, str):
            draft.refuse(key, "text")
            continue
        if not _FILE_ID.fullmatch(value):
            draft.carry(dotted, value, key)
        elif dotted == "data.train":
            draft.carry(dotted, ROWS, key)
        draft.reach(key)
        if _FILE_ID.fullmatch(value):
            draft.lose_part(key, "", value, f"a file uploaded to OpenAI; give {dotted} {without}")


TOOL = ToolSchema(
    name="openai",
    keys=KEYS,
    known=KNOWN,
    gone={},
    finish=_finish,
    open_sections=key_set("metadata usage_metrics error integrations method hyperparameters"),
)
