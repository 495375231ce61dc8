"""DSK: files of the run that will not fit on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from surefit.config.resolve import ResolvedConfig
from surefit.core.units import bytes_text
from surefit.facts.disk import disk_advice, disk_terms, download_term
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.lint.rule import Finding, rule


@rule("DSK001", "run-does-not-fit-the-disk", severity="error")
def run_does_not_fit_the_disk(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts
) -> Iterator[Finding]:
    """The run's files are larger than the free disk space.

    ## What it does
    Adds up the kept checkpoints and the one being written, the trained adapter or model, the merged model and, if the
    base model still has to be downloaded to the same disk, its files. Compares the sum with `hardware.disk` or, if that
    is not set, with the free space at `output_dir`. Skipped if the config names a GPU that this machine does not have
    and does not set `hardware.disk`: then the run is planned for another machine.

    ## Why it is bad
    The disk fills in the middle of a save, hours into the run; other tools leave a half-written checkpoint behind.

    ## Example
    Full training of an 8B model with 3 checkpoints of 112 GB.

    ## Fix
    Lower `save_total_limit`, choose an `output_dir` on a larger disk, or rent a larger one.

    ## Evidence
    A published report on distilling Llama-3.1-8B stopped at step 9,000 with a full disk although `save_total_limit` was
    set: the limit does not count the checkpoint that is being written, nor the merged model.
    """
    terms = disk_terms(resolved, model)
    directory = Path(resolved.config.output_dir)
    if terms and (download := download_term(model, hardware, directory)):
        terms.append(download)
    needed_bytes, free_bytes = sum(term.bytes for term in terms), hardware.disk_free_bytes
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    from_config = hardware.disk_source == "config"
    if free_bytes == 0 and not from_config:
        yield Finding(
            field="output_dir",
            message=f"the run will write {bytes_text(needed_bytes)}, but nothing can be written at {directory}",
            help="choose an output_dir on a disk with free space",
        )
        return
    where = "by hardware.disk" if from_config else f"at {resolved.config.output_dir}"
    yield Finding(
        field="hardware.disk" if from_config else "checkpoint.save_total_limit",
        message=f"the run will write {bytes_text(needed_bytes)}, but only {bytes_text(free_bytes)} are free {where}",
        help=disk_advice(resolved, model, hardware)
        + ("" if from_config else ", or choose an output_dir on a larger disk"),
        evidence="; ".join(f"{term.term} {bytes_text(term.bytes)}" for term in terms),
    )
