"""The verb `prepare`: the shards that are complete, and those still to be made."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import typer

from surefit.cli.exits import verb
from surefit.cli.options import ConfigFile, Overrides, repeat_option
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.units import bytes_text


@verb
def prepare(
    out: Output,
    config: ConfigFile,
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Number of worker processes.")] = 1,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only every N-th shard from the I-th: one task of an array job.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="First delete shards of other settings.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read all shards; rebuild damaged ones.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes here, or the cores of a Ray cluster.")
    ] = "local",
) -> int:
    """Tokenize into shards in data.tokenized, for data larger than memory; if killed, run it again to continue."""
    from surefit.config.load import load_config
    from surefit.stages.tokenize_shards import ShardOptions, prepare_shards

    if engine == "ray" and workers > 1:
        raise ConfigError("--workers goes with --engine local", code="E1036", help="Ray uses every core of its cluster")
    options = ShardOptions(workers, _group(shard), overwrite, verify, dry_run, engine)
    result = prepare_shards(load_config(config, overrides or ()).config, out, options)
    _say(out, result, shard, dry_run)
    if dry_run or result["manifest"]:
        out.next_step(["prepare" if dry_run else "train", config, *repeat_option("--set", overrides or ())])
    out.result(result)
    return EXIT_OK


def _group(shard: str | None) -> tuple[int, int] | None:
    """Return (index of the group, counted from 0; number of groups).

    Raises:
        ConfigError: not of the form I/N with I from 1 to N.
    """
    if shard is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", shard)
    if not match or int(match[1]) > int(match[2]):
        raise ConfigError(f"--shard {shard} names no group", code="E1037", help="--shard 3/16 is the third of 16")
    return int(match[1]) - 1, int(match[2])


def _say(out: Output, result: dict[str, Any], shard: str | None, dry_run: bool) -> None:
    done, total = result["complete"], result["shards"]
    if dry_run:
        out.say(f"{total:,} shards from {bytes_text(result['bytes'])}, {done:,} of them complete; nothing was written")
        return
    out.say(
        f"{total:,} shards{f' of group {shard}' if shard else ''}: {result['rows']:,} rows, "
        f"{result['tokens']:,} tokens, {result['held_out']:,} rows held out → {result['directory']}"
    )
    if not result["manifest"]:
        out.say("the last group to finish writes the manifest")
