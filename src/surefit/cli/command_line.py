"""Mistakes on the command line: unknown verbs and options get the word that was meant, in the format of all errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from surefit.cli.render import Output
from surefit.core.errors import ConfigError, did_you_mean
from surefit.core.units import shell_quote

UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""typer's own class, or click's with the releases of typer that use click."""
OTHER_WORDS = {
    "train": "finetune fine-tune tune sft fit lora qlora resume",
    "check": "validate lint verify",
    "init": "new create start setup quickstart",
    "evaluate": "eval test benchmark",
    "predict": "infer inference generate",
    "chat": "talk ask cli webchat",
    "import": "convert migrate",
    "ui": "web webui gui serve studio",
    "export": "quantize gguf save",
    "push": "upload publish",
    "prepare": "tokenize preprocess pretokenize",
    "plan": "estimate memory vram",
    "runs": "ls list history",
    "doctor": "env info status diagnose",
    "demo": "example tutorial",
    "merge": "fuse merge-lora",
    "explain": "rule rules why",
}
"""Verb → the words that other tools have for it."""
OPTIONS = {
    "-c": "CONFIG", "--config": "CONFIG", "--config-file": "CONFIG", "--config_file": "CONFIG",
    "-m": "--set model.name_or_path=", "--model": "--set model.name_or_path=",
    "-d": "--set data.train=", "--data": "--set data.train=", "--dataset": "--set data.train=",
    "-o": "--set output_dir=", "--output": "--set output_dir=",
    "--batch-size": "--set train.per_device_train_batch_size=",
    "--epochs": "--set train.num_train_epochs=", "--num-gpus": "--gpus",
    "--nproc": "--gpus", "--nproc-per-node": "--gpus",
    "--force": "--overwrite", "-f": "--overwrite", "--continue": "--resume", "--resume-from-checkpoint": "--resume",
    "--verbose": "", "-v": "", "--debug": "", "--device": "--set hardware.gpu=", "--gpu": "--set hardware.gpu=",
}  # fmt: skip
"""Option of other tools → how it is written here, unless the verb has an option of that name."""
EXAMPLES = {
    "CONFIG": "run.yaml", "TARGET": "run.yaml", "RUN": "runs/first", "CONFIG|DATA": "train.jsonl",
    "FILE": "axolotl.yaml",
    "CODE": "SCH001",
}  # fmt: skip
"""Name of an argument → an example of it."""


class _Suggests:
    """Parsing of options that says which one was meant, and a help in which flags show no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except UsageError as error:
            if type(error).__name__ == "NoSuchOption":
                raise _no_such_option(error.option_name, words, ctx) from error  # type: ignore[attr-defined]
            for place, word in enumerate(words[1:-1], start=1):
                if words[place - 1] == "--set" and "=" not in word and "unexpected extra" in str(error):
                    setting = shell_quote(f"{word}={words[place + 1]}")
                    raise ConfigError(
                        f"--set {word}: a value follows without =", code="E1711", help=f"write --set {setting}"
                    ) from error
            raise


class Verb(_Suggests, TyperCommand):
    """A verb."""


class Verbs(_Suggests, TyperGroup):
    """The verbs: an unknown one gets the verb that was meant; every usage error is printed as all errors are."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise _no_such_verb(args, self.commands)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(*args, **(extra | {"standalone_mode": False}))
        except ConfigError as problem:
            if not standalone_mode:
                raise
            Output().error(problem)
            sys.exit(problem.exit_code)
        except typer.Abort:
            sys.exit(130)
        except UsageError as error:
            if not standalone_mode:
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                Output().error(_usage_problem(error))
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _no_such_verb(args: list[str], verbs: Iterable[str]) -> ConfigError:
    word = args[0]
    meant = next((verb for verb, words in OTHER_WORDS.items() if word.lower() in words.split()), None)
    if word.endswith((".yaml", ".yml")):
        return ConfigError(
            f"{word}: no such command",
            code="E1700",
            help=f"a verb comes first: surefit check {shell_quote(word)}, then surefit run {shell_quote(word)}",
        )
    hint = f"; did you mean '{meant}'?" if meant else did_you_mean(word.lower(), verbs)
    meant = meant or hint.partition("'")[2].partition("'")[0] or None
    help_text = f"surefit {shell_quote(meant)} --help says how" if meant else "surefit --help lists the commands"
    if meant == "train":
        help_text += "; `surefit run CONFIG` checks, plans, trains, merges and evaluates"
    return ConfigError(f"{word}: no such command{hint}", code="E1701", help=help_text)


def _no_such_option(option: str, args: list[str], ctx: Any) -> ConfigError:
    """Return the error for an option that the verb lacks, with the option or the config key that was meant."""
    options = [name for parameter in ctx.command.params for name in parameter.opts if name.startswith("-")]
    value = _value_of(option, args)
    message = f"{option}: `{ctx.command_path}` has no such option"
    sets_values = "--set" in options
    written = OPTIONS.get(option)
    if written == "CONFIG":
        command = f"surefit {shell_quote(ctx.command.name)} {shell_quote(value or 'run.yaml')}"
        return ConfigError(message, code="E1702", help=f"the config comes without it: {command}")
    if written == "":
        return ConfigError(
            message, code="E1703", help="only `surefit plan` has it; RUN/log.txt has what a command printed, with times"
        )
    if written in options:
        return ConfigError(f"{message}; did you mean '{written}'?", code="E1704", help=_all_options(ctx))
    close = did_you_mean(option, options)
    if sets_values and (option in OPTIONS or not close) and (key := _config_key(option)) is not None:
        sentence = f"write --set {key}" if "=" in key else f"write {shell_quote_set(key, value)}"
        return ConfigError(
            message, code="E1705", help=f"it is a value of the config: {sentence}, or set it in the file"
        )
    return ConfigError(f"{message}{close}", code="E1706", help=_all_options(ctx))


def _all_options(ctx: Any) -> str:
    return f"{ctx.command_path} --help lists its options"


def shell_quote_set(key: str, value: str | None) -> str:
    """Return the option that sets a config key.

    >>> shell_quote_set("train.learning_rate", "1e-4"), shell_quote_set("data.train", None)
    ('--set train.learning_rate=1e-4', '--set data.train=…')
    """
    return f"--set {shell_quote(f'{key}={value}') if value else f'{key}=…'}"


def _value_of(option: str, args: list[str]) -> str | None:
    """Return the value that was given to an option: after `=`, or the next word."""
    for place, word in enumerate(args):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and place + 1 < len(args) and not args[place + 1].startswith("--"):
            return args[place + 1]
    return None


def _config_key(option: str) -> str | None:
    """Return the config key that an option of another tool or a guessed one means, or `key=value`; None if none does.

    >>> _config_key("--lr"), _config_key("--load_in_4bit"), _config_key("--lora-r"), _config_key("--per-device-batch")
    ('train.learning_rate', 'model.quantization=nf4', 'lora.r', None)
    >>> _config_key("--train.max_steps"), _config_key("--fp16"), _config_key("--max-steps"), _config_key("--gnome")
    ('train.max_steps', 'model.dtype=float16', 'train.max_steps', None)
    """
    from surefit.config.load import find_section, is_key
    from surefit.config.tool_keys import describe_tool_key
    from surefit.importers.recognize import FLAT

    name = option.lstrip("-").replace("-", "_")
    written = OPTIONS.get(option, "")
    if written.startswith("--set "):
        return written.removeprefix("--set ").rstrip("=")
    written = describe_tool_key(name, True)[1].rpartition(" as ")[2]
    key, _, value = (FLAT.get(name) or written).partition(",")[0].partition(": ")
    if is_key(name):
        return name
    if key and is_key(key):
        return f"{key}={value}" if value else key
    section = find_section(name)
    return f"{section}.{name}" if section else None


def _usage_problem(error: Any) -> ConfigError:
    """Return typer's usage error as an error of SureFit's."""
    ctx, parameter, name = error.ctx, getattr(error, "param", None), type(error).__name__
    message = " ".join(str(error.message).split()).removeprefix("Value error, ").rstrip(".")
    if typed := re.match(r"Input should be a valid (integer|number)", message):
        message = f"expected {'a whole number' if typed[1] == 'integer' else 'a number'}"
    if ctx is None:
        return ConfigError(message, code="E1707")
    usage = " ".join(ctx.get_usage().replace("Usage:", "usage:").split())
    shown = ""
    if parameter is not None:
        shown = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name
    if name == "MissingParameter" and parameter is not None:
        example = EXAMPLES.get(shown.removesuffix("..."))
        about = f": {_lower_first(parameter.help.rstrip('.'))}" if parameter.help else ""
        help_text = f"for example: {ctx.command_path} {example}" if example else usage
        return ConfigError(f"{shown} is missing{about}", code="E1708", help=help_text)
    if extra := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.+)\)", message):
        help_text = f"{usage}; quote a name that has spaces, and run the command once for each of several configs"
        return ConfigError(f"{extra[1]}: one argument too many", code="E1709", help=help_text)
    if parameter is not None and parameter.param_type_name == "option":
        shown = parameter.opts[-1]
    return ConfigError(message, code="E1710", field=shown or None, help=usage)


def _lower_first(text: str) -> str:
    """Return a sentence as it stands after a colon.

    >>> _lower_first("A run."), _lower_first("RUN, or a baseline")
    ('a run.', 'RUN, or a baseline')
    """
    return text if text[1:2].isupper() else text[0].lower() + text[1:]
