"""ARG: keys of other tools that are gone, unknown or without effect."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, rule


@rule("ARG001", "argument-gone", severity="error")
def argument_gone(setup: Setup) -> Iterator[Finding]:
    """A key is set that current releases of the tool no longer accept.

    ## What it does
    Compares the keys of another tool's config with the keys that the tool has dropped or renamed.

    ## Why it is bad
    The tool stops with "unexpected keyword argument", often only after the model has been downloaded; tools that ignore
    unknown keys train without the setting.

    ## Example
    `evaluation_strategy: steps`, `warmup_ratio: 0.1` or `group_by_length: true` with transformers 5; `max_seq_length`
    in TRL's SFTConfig.

    ## Fix
    Write the replacement that the finding names.

    ## Evidence
    transformers 5 has dropped `warmup_ratio`, `group_by_length`, `overwrite_output_dir` and `logging_dir`. The authors
    of three published reports, on function calling, recommendation and legal summaries, lost runs to renamed arguments.
    """
    for key, instead in setup.gone.items():
        yield Finding(
            field=key,
            message=f"{setup.name(key)} is no longer accepted by {_tool(setup, key)}",
            help=instead,
        )


@rule("ARG002", "argument-unknown", severity="error")
def argument_unknown(setup: Setup) -> Iterator[Finding]:
    """A key is set that the tool does not have.

    ## What it does
    Compares the keys of another tool's config with all keys that the tool accepts.

    ## Why it is bad
    The tool stops with "unexpected keyword argument", or ignores the key and trains with its default.

    ## Example
    `dropout` in an adapter's config: PEFT's `LoraConfig` calls it `lora_dropout`.

    ## Fix
    Correct the name, or remove the key.

    ## Evidence
    A published report on summarizing legal documents passed `dropout` to `LoraConfig` and `dataset_text_field` and
    `max_seq_length` to a `Trainer` that has neither.
    """
    for key in setup.unknown:
        suggestion = setup.meant.get(key)
        yield Finding(
            field=key,
            message=f"{_tool(setup, key)} has no "
            f"{setup.name(key)}{f'; did you mean {suggestion!r}?' if suggestion else ''}",
            help=f"write {suggestion}" if suggestion else "correct the name, or remove the key",
        )


@rule("ARG003", "argument-without-effect", severity="warning")
def argument_without_effect(setup: Setup) -> Iterator[Finding]:
    """A key is set that has no effect.

    ## What it does
    Looks for keys of another tool's config that something else in it overrides or switches off.

    ## Why it is bad
    Readers of the config believe that the setting is in force, and tuning it compares identical runs.

    ## Example
    `save_steps: 100` beside `save_strategy: epoch`.

    ## Fix
    Remove the key, or change the setting that overrides it.

    ## Evidence
    A published function-calling project documented metrics ports that none of its parsers defined.
    """
    for key, cause in setup.ignored.items():
        yield Finding(
            field=key,
            message=f"{setup.name(key)} has no effect: {cause}",
            help="remove it, or change what overrides it",
        )


@rule("ARG004", "argument-passed-over", severity="warning")
def argument_passed_over(setup: Setup) -> Iterator[Finding]:
    """A key is set that the tool does not have and silently ignores.

    ## What it does
    Compares the keys of another tool's config with all keys of that tool, where the tool or a script may read others:
    Axolotl, DeepSpeed and PEFT ignore unknown keys, and scripts around TRL have their own arguments. A key that is a
    letter or two off a known one is an error (ARG002).

    ## Why it is bad
    The setting silently has no effect.

    ## Example
    `gptq_groupsize: 128` for Axolotl, which dropped it.

    ## Fix
    Remove the key, or correct its name.

    ## Evidence
    pydantic's models ignore extra fields by default; 10 of 139 example configs of Axolotl have one.
    """
    for key in setup.passed_over:
        yield Finding(
            field=key,
            message=f"{_tool(setup, key)} has no {setup.name(key)} and ignores it"
            if setup.tool != "trl"
            else f"{_tool(setup)}'s own commands do not accept {setup.name(key)}",
            help=_where_it_belongs(setup, key),
        )


@rule("ARG005", "argument-deprecated", severity="warning")
def argument_deprecated(setup: Setup) -> Iterator[Finding]:
    """A key is set that the tool still accepts, but has deprecated.

    ## What it does
    Compares the keys of another tool's config with the keys that it warns about.

    ## Why it is bad
    The next release will reject it, or ignore it.

    ## Example
    `evaluation_strategy: steps` in an Axolotl config.

    ## Fix
    Write the replacement that the finding names.

    ## Evidence
    Axolotl 0.19.0, utils/schemas/deprecated.py: "evaluation_strategy is deprecated, use eval_strategy instead".
    """
    for key, instead in setup.deprecated.items():
        yield Finding(field=key, message=f"{setup.name(key)} is deprecated in {_tool(setup, key)}", help=instead)


@rule("ARG006", "file-not-there", severity="warning")
def file_not_there(setup: Setup) -> Iterator[Finding]:
    """Another tool's config names a file that does not exist.

    ## What it does
    Looks for the files that the config names, relative to the working directory, the config's own folder and its parent
    folders. Nothing is reported if the file's folder does not exist either: then the config is meant for another
    machine.

    ## Why it is bad
    The run stops at the missing file, in some tools only after the model is loaded.

    ## Example
    `deepspeed: configs/stage4.json` beside `configs/stage3.json`.

    ## Fix
    Correct the path.

    ## Evidence
    FileNotFoundError for a DeepSpeed config is a frequent question in the issues of axolotl and LLaMA-Factory.
    """
    for key, file in setup.missing.items():
        yield Finding(field=key, message=f"{file} does not exist", help="correct the path, or create the file")


@rule("ARG007", "import-gone", severity="error")
def import_gone(setup: Setup) -> Iterator[Finding]:
    """A script imports a name that its library no longer has.

    ## What it does
    Compares the imports of a Python script with the names that transformers, TRL, PEFT and datasets have dropped.
    Imports inside `try` are skipped, and so are names that the releases in the script's requirements still have.

    ## Why it is bad
    The script stops at its first lines with an ImportError. Where the import is inside a function, it stops later.

    ## Example
    `from transformers.data.processors.utils import InputFeatures`.

    ## Fix
    Write the replacement that the finding names, or pin the library to an older release.

    ## Evidence
    The authors of a published report on LLM ranking replaced such imports after an upgrade. Verified in transformers
    5.23, TRL 1.16, PEFT 0.21 and datasets 5.2. (`transformers.file_utils`, which they also replaced, still exists.)
    """
    for name, instead in setup.gone_imports.items():
        yield Finding(field=name, message=f"{name} can no longer be imported", help=instead)


@rule("ARG023", "key-set-twice", severity="warning")
def key_set_twice(setup: Setup) -> Iterator[Finding]:
    """A key is set more than once.

    ## What it does
    Looks for keys that occur twice in another tool's YAML or JSON. In SureFit's own configs and in LLaMA-Factory such a
    key is an error.

    ## Why it is bad
    Only the last value counts, so changing the first has no effect.

    ## Example
    `adapter: lora` on line 12 of an Axolotl config and again on line 50.

    ## Fix
    Remove one of the two.

    ## Evidence
    `yaml.safe_load` and `json.load`, which read the configs of Axolotl, TRL, Accelerate and PEFT, keep the last value.
    """
    for key, (first, last) in setup.repeated.items():
        yield Finding(
            field=key,
            message=f"{setup.name(key)} is set on line {first} and again on line {last}: the last value counts",
            help=f"remove the one on line {first}",
        )


@rule("ARG024", "value-out-of-range", severity="warning")
def value_out_of_range(setup: Setup) -> Iterator[Finding]:
    """A number is outside the sensible range, but the tool accepts it.

    ## What it does
    Compares the numbers of another tool's config with the range of the same setting in SureFit's own config.

    ## Why it is bad
    The tool does not report it, and the run is worthless or fails after the model is loaded.

    ## Example
    `weight_decay: 10` instead of 0.1.

    ## Fix
    Write a number in the range that the finding names.

    ## Evidence
    The usual mistake is a missing sign or decimal point (`2e4` for `2e-4`), and the schemas of Axolotl, LLaMA-Factory
    and transformers set no upper bound.
    """
    for key, expected in setup.out_of_range.items():
        yield Finding(field=key, message=f"{setup.name(key)}: expected {expected}", help=f"write {expected}")


@rule("ARG035", "column-left-out", severity="warning")
def column_left_out(setup: Setup) -> Iterator[Finding]:
    """A column of the rows is not read, because `columns` does not name it.

    ## What it does
    In a dataset_info.json of LLaMA-Factory: looks for `columns` without `prompt`, `query` or `response`, where the rows
    have text in their default column (`instruction`, `input`, `output`).

    ## Why it is bad
    Named columns replace all defaults: the column's text is silently left out of every prompt.

    ## Example
    `"columns": {"prompt": "instruction", "response": "output"}` for rows with an `input`.

    ## Fix
    Name the column, or remove it from the rows.

    ## Evidence
    LLaMA-Factory 0.9.5, data/parser.py: `DatasetAttr.join` sets every column that is not named to None.
    """
    for column, role in setup.columns_left_out.items():
        yield Finding(
            field="columns_left_out",
            message=f"the rows have text in {column!r}, but columns does not name it ({role}): it is not read",
            help=f'add "{role.rpartition(": ")[2]}": "{column}" to columns',
        )


def _where_it_belongs(setup: Setup, key: str) -> str:
    if setup.tool == "trl":
        return "keep it only if your own script accepts it"
    if setup.tool == "accelerate" and key.startswith("deepspeed_config."):
        return "write it into a DeepSpeed JSON file, and set deepspeed_config_file to that file"
    return "remove it, or correct its name"


def _tool(setup: Setup, key: str = "") -> str:
    if setup.tool == "python":
        return key.partition(".")[0]
    names = {"axolotl": "Axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL", "accelerate": "accelerate"}
    names |= {"swift": "ms-swift"}
    return (names | {"deepspeed": "DeepSpeed", "peft": "PEFT", "slurm": "the Trainer"}).get(setup.tool, setup.tool)
