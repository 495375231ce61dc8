"""The batch audit before the first step, judged by the lint rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.config.schema import SureFitConfig
from surefit.core.errors import GateError
from surefit.core.rundir import RunDir, skip_if_disk_full, write_json
from surefit.data.audit.batches import Item, audit_batches
from surefit.facts.batch import BatchFacts
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import Finding, LintContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUDITED = 4
"""Number of micro batches of the next step that are audited."""


def require_sound_batches(
    batches: Sequence[tuple[Mapping[str, Any], Sequence[Item]]],
    tokenizer: PreTrainedTokenizerBase,
    conversations: bool,
    config: SureFitConfig,
    run: RunDir | None,
) -> None:
    """Audit micro batches (see `audit_batches`) and judge the facts by the lint rules.

    Args:
        run: facts and findings are written to its batch_audit.json; None writes nothing.

    Raises:
        GateError: the first finding of severity error; the others are in its `also`.
        MachineError: the file cannot be written.
    """
    facts = audit_batches(batches, tokenizer, conversations)
    rules = [rule for rule in all_rules() if BatchFacts in rule.needs]
    result = run_rules(LintContext(config=config, path=Path(config.output_dir), batch=facts), rules)
    if run is not None:
        with skip_if_disk_full():
            write_json(run.batch_audit, asdict(facts) | result.as_dict())
    if result.errors:
        first, *rest = map(_gate, result.errors)
        first.also = tuple(rest)
        raise first


def _gate(finding: Finding) -> GateError:
    return GateError(
        f"{finding.code}: {finding.message}",
        code="E5110",
        path=finding.path,
        help=f"{finding.help}; no step was taken, and `surefit explain {finding.code}` says more",
    )
