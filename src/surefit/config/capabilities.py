"""Settings that cannot be combined: one table, with the reason and the way out.

`check` reports every conflict of a config, `resolve` and the plan's search choose nothing that conflicts, and training
raises on the same conflicts; the engines have no list of their own. To allow or forbid a combination, change the table;
the combinations in tests/combinations show whether it is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from surefit.config.modes import WEIGHTS_DIVIDED, ZERO, ModeName
from surefit.config.optimizers import BitsAndBytesName, OtherName
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError

Trait = Literal[
    ModeName,
    "shared tokens",  # parallel.cp, under any mode
    "nf4", "fp8",  # model.quantization
    OtherName,  # train.optim
    "all weights", "DoRA", "experts", "dropout", "fused LoRA", "fused kernels", "compiled layers", "NEFTune",
    "new tokens", "flash attention", "answers in training",
    "shared prompts",
    "pairs", "labelled answers", "reference",  # objective
    "truncated documents", "prepared data",
]  # fmt: skip
"""Properties of a run that the table refers to."""
TRAITS: tuple[Trait, ...] = get_args(Trait)

QUANTIZED: tuple[Trait, ...] = ("nf4", "fp8")
BITSANDBYTES: tuple[Trait, ...] = get_args(BitsAndBytesName)
NOT_ADAMW: tuple[Trait, ...] = get_args(OtherName)
WITHOUT: dict[Trait, str] = {
    **dict.fromkeys(QUANTIZED, "model.quantization: none"),
    **dict.fromkeys(NOT_ADAMW, "train.optim: adamw_torch"),
    "all weights": "train.method: lora",
    "DoRA": "lora.use_dora: false",
    "experts": "lora.experts: false",
    "dropout": "lora.lora_dropout: 0",
    "fused LoRA": "speed.fused_lora: false",
    "fused kernels": "speed.kernels: false",
    "compiled layers": "speed.compile: false",
    "NEFTune": "train.neftune_noise_alpha: null",
    "new tokens": "model.add_tokens: []",
    "flash attention": "speed.attention: auto",
    "answers in training": "evaluate.in_training: false",
    "shared prompts": "speed.shared_prompts: false",
    "shared tokens": "parallel.cp: 1",
    "pairs": "objective.name: sft",
    "labelled answers": "objective.name: sft",
    "truncated documents": "data.too_long: drop",
    "prepared data": "data.tokenized: null",
}
"""Setting that removes a trait; the other traits are values of `parallel.mode`."""


@dataclass(frozen=True)
class Conflict:
    """Two traits that cannot be combined.

    Attributes:
        one, other: the traits; `other` is the one that is reported as the fault, and that the help gives up.
        why: the reason, as a clause.
        instead: another way out than to give up `other`.
        code: code of the rule that reports it.
    """

    one: Trait
    other: Trait
    why: str
    instead: str
    code: str

    @property
    def field(self) -> str:
        return WITHOUT[self.other].partition(":")[0]

    @property
    def message(self) -> str:
        return f"{_named(self.one)} and {_named(self.other)} cannot be combined: {self.why}"

    @property
    def help(self) -> str:
        return f"set {WITHOUT[self.other]}{f'; or {self.instead}' if self.instead else ''}"


def _named(trait: Trait) -> str:
    if trait in (*QUANTIZED, *NOT_ADAMW):
        return f"{WITHOUT[trait].partition(':')[0]} {trait}"
    if trait == "reference":
        return "an objective with a reference"
    return trait if trait in WITHOUT else f"parallel.mode {trait}"


def _rows(code: str, ones: Iterable[Trait], others: Iterable[Trait], why: str, instead: str = "") -> Iterator[Conflict]:
    yield from (Conflict(first, second, why, instead, code) for first in ones for second in others)


AT_THE_START = (
    "the reference's log-probabilities are computed without it: the rewards would not be 0 at the start, and the check "
    "of the first batch could not tell a wrong reference from it"
)
NOT_PROVED = "the result has not been proved to equal a single process's"
WHOLE = "parallel.mode: ddp"
CONFLICTS: tuple[Conflict, ...] = (
    *_rows("PAR009", ["fsdp"], QUANTIZED, "the scales of quantized weights are stored separately", WHOLE),
    *_rows("PAR009", ["zero3"], QUANTIZED, "quantized weights lose their scales when they are cut up",
           "parallel.mode: zero2 or ddp"),
    *_rows("PAR009", ["tp"], QUANTIZED, "the blocks of quantized weights cross the edges of slices",
           "parallel.mode: pp or ddp"),
    *_rows("PAR012", ["fsdp"], BITSANDBYTES, "the optimizers of bitsandbytes cannot update shards", WHOLE),
    *_rows("PAR012", ZERO, NOT_ADAMW,
           "DeepSpeed shards the state of torch's AdamW only", WHOLE),
    *_rows("PAR012", ["tp"], BITSANDBYTES, "it cannot update matrices that several processes share",
           "another parallel.mode"),
    *_rows("PAR012", ["zero3"], ["fused LoRA"],
           "it reads the factors of several layers at once, and zero3 gathers one layer's at a time"),
    *_rows("PAR012", ["tp"], ["fused LoRA"], "it multiplies whole factors, and tensor parallelism cuts them"),
    *_rows("PAR012", ["zero2", "zero3", "tp", "pp", "cp", "shared tokens"], ["fused kernels"], NOT_PROVED),
    *_rows("PAR012", ["zero3"], ["compiled layers"], "they leave out the hooks with which zero3 gathers weights"),
    *_rows("PAR012", ["tp"], ["compiled layers"], NOT_PROVED),
    *_rows("PAR012", ["pp"], ["compiled layers"], "torch cannot trace the code that skips other stages' layers"),
    *_rows("PAR012", ["shared tokens"], ["NEFTune"],
           "its noise depends on the length of a document, and each process has only a part of it"),
    *_rows("PAR012", ["tp"], ["NEFTune"], "the embeddings that it adds noise to are shared"),
    *_rows("PAR012", ["shared tokens"], ["flash attention"],
           "it cannot read an example whose tokens several processes share"),
    *_rows("ADP003", ["all weights"], QUANTIZED, "integers have no gradient", "train.method: lora"),
    *_rows("ADP006", ["fp8"], ["DoRA"], "PEFT's DoRA reads float8 weights without their scales",
           "model.quantization: nf4 or none"),
    *_rows("ADP006", ["DoRA"], ["fused LoRA"], "it computes plain LoRA, without DoRA's magnitudes"),
    *_rows("ADP006", ["DoRA"], ["compiled layers"], NOT_PROVED),
    *_rows("ADP006", [*ZERO, "tp", "pp"], ["DoRA"], NOT_PROVED, "parallel.mode: ddp or fsdp"),
    *_rows("ADP006", ["shared tokens"], ["DoRA"], NOT_PROVED, "parallel.cp: 1"),
    *_rows("ADP009", ["experts"], ["dropout"],
           "an expert's factors are added to its weights, which leaves no input to apply dropout to"),
    *_rows("ADP009", ["DoRA"], ["experts"], "PEFT's DoRA does not support stacked experts",
           "lora.use_dora: false"),
    *_rows("ADP009", QUANTIZED, ["experts"], "the experts are not quantized, and " + NOT_PROVED,
           "model.quantization: none"),
    *_rows("ADP009", ["fsdp", *ZERO, "tp", "pp"], ["experts"], NOT_PROVED, WHOLE),
    *_rows("ADP009", ["shared tokens"], ["experts"], NOT_PROVED, "parallel.cp: 1"),
    *_rows("ADP009", ["compiled layers"], ["experts"], NOT_PROVED, "speed.compile: false"),
    *_rows("MOD014", ["fsdp", *ZERO, "tp", "pp", "cp"], ["new tokens"], NOT_PROVED, WHOLE),
    *_rows("MOD014", ["compiled layers"], ["new tokens"], NOT_PROVED, "speed.compile: false"),
    *_rows("MOD014", ["shared tokens"], ["new tokens"], NOT_PROVED, "parallel.cp: 1"),
    *_rows("PAR011", WEIGHTS_DIVIDED, ["answers in training"],
           "no process has the whole model, which generation needs", "`surefit evaluate` afterwards"),
    *_rows("PAR011", ["cp"], ["answers in training"], "attention waits for the other processes' share of the tokens: "
           "no process can generate alone", "`surefit evaluate` afterwards"),
    *_rows("CFG009", ["reference"], ["dropout", "NEFTune"], AT_THE_START),
    *_rows("CFG009", ["pairs"], ["truncated documents"],
           "a document that is cut for the longer answer would be another prompt for the shorter one"),
    *_rows("CFG009", ["pairs"], ["prepared data"], "`surefit prepare` writes single answers, not pairs",
           "name the pairs as data.train"),
    *_rows("CFG009", ["fsdp", *ZERO, "tp", "pp", "cp", "shared tokens", "compiled layers"], ["shared prompts"],
           NOT_PROVED),
    *_rows("CFG009", ["flash attention"], ["shared prompts"], "it reads an example as one document",
           "speed.attention: auto"),
    *_rows("CFG009", ["dropout", "NEFTune"], ["shared prompts"],
           "both answers would read a prompt with the same random numbers"),
    *_rows("CFG009", ["fsdp", *ZERO, "tp", "pp", "cp", "shared tokens"], ["labelled answers"], NOT_PROVED, WHOLE),
    *_rows("CFG009", ["labelled answers"], ["truncated documents"],
           "kto sets each answer behind another row's prompt too, which was cut for its own answer"),
    *_rows("CFG009", ["labelled answers"], ["prepared data"], "`surefit prepare` writes answers without their labels",
           "name the rows as data.train"),
    *_rows("PAR011", ["zero2"], ["answers in training"], "it is implemented for parallel.mode ddp and for "
           "one device", "`surefit evaluate` afterwards"),
)  # fmt: skip


def traits(config: SureFitConfig) -> frozenset[Trait]:
    """Return the traits of a config; "auto" counts as chosen so that nothing conflicts."""
    lora, train, speed, parallel = config.adapter, config.train, config.speed, config.parallel
    present = {
        "shared tokens": parallel.cp > 1,
        "all weights": lora is None,
        "DoRA": lora and lora.use_dora,
        "experts": lora and lora.experts,
        "dropout": lora and lora.lora_dropout > 0,
        "fused LoRA": lora and speed.fused_lora is True,
        "fused kernels": speed.kernels is True,
        "compiled layers": speed.compile,
        "NEFTune": train.neftune_noise_alpha is not None,
        "new tokens": bool(config.model.add_tokens),
        "flash attention": speed.attention.startswith("flash"),
        "answers in training": config.evaluate.in_training,
        "shared prompts": speed.shared_prompts is True,
        "pairs": config.objective.paired,
        "labelled answers": config.objective.labelled,
        "reference": config.objective.has_reference,
        "truncated documents": config.data.cuts,
        "prepared data": config.data.tokenized is not None,
    }
    # The sizes of tp and pp alone decide what mode `auto` becomes.
    parallel_modes = [name for name in ("tp", "pp") if getattr(parallel, name) > 1]
    values = {parallel.mode, *parallel_modes, config.model.quantization, train.optim}
    return frozenset(trait for trait in TRAITS if trait in values or present.get(trait, False))


def conflicts(there: frozenset[Trait]) -> list[Conflict]:
    """Return every row of the table whose two traits are present."""
    return [row for row in CONFLICTS if row.one in there and row.other in there]


def conflict_with_trait(config: SureFitConfig, trait: Trait) -> Conflict | None:
    """Return the first conflict that adding this trait to the config would cause."""
    existing_traits = traits(config)
    return next((row for row in conflicts(existing_traits | {trait}) if trait in (row.one, row.other)), None)


def require_compatible_settings(config: SureFitConfig) -> None:
    """Raise if the config has settings that cannot be combined.

    Raises:
        ConfigError: for the first conflict; the others are in `also`.
    """
    errors = [
        ConfigError(row.message, code="E2101", field=row.field, help=row.help) for row in conflicts(traits(config))
    ]
    if errors:
        first, *others = errors
        first.also = tuple(others)
        raise first
