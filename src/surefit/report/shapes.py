"""Pydantic models of a run's artefacts, with the fields that the page needs.

Fields that the page does not require are optional, and fields that it does not show are ignored, so that the page of an
older or a newer run can still be written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(ge=-1e18, le=1e18)]
"""A finite number of a size that can be summed and printed."""
Count = Annotated[int, Field(ge=-(10**15), le=10**15)]
Interval = tuple[Number, Number]


class Artefact(BaseModel):
    """An artefact or a part of one; fields that the page does not show are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class FindingRecord(Artefact):
    code: str
    severity: Literal["error", "warning", "info"]
    message: str
    name: str | None = None
    path: str | None = None
    line: Count | None = None
    field: str | None = None
    help: str | None = None
    evidence: Any = None


class SuppressedRecord(FindingRecord):
    """A finding that the config accepts."""

    reason: str = ""


class CheckRecord(Artefact):
    """Content of check.json."""

    findings: list[FindingRecord]
    suppressed: list[SuppressedRecord] = []
    rules: Count | None = None


class HistogramRecord(Artefact):
    """Counts of lengths in bins of equal width, from 0; `over` counts lengths beyond the last bin."""

    width: Annotated[int, Field(ge=1, le=10**12)] = 1
    counts: Annotated[list[Annotated[int, Field(ge=0, le=10**15)]], Field(max_length=200)] = []
    over: Annotated[int, Field(ge=0, le=10**15)] = 0


class LengthsRecord(Artefact):
    """Statistics of the lengths of one part of the examples."""

    total: Count = 0
    mean: Number | None = None
    p50: Count | None = None
    p95: Count | None = None
    p99: Count | None = None
    max: Count | None = None
    histogram: HistogramRecord = HistogramRecord()


class Observed(Artefact):
    """Rows of the data audit with one property: `rows` of `of`."""

    rows: Count
    of: Count
    examples: list[str] = []
    detail: str = ""


class Passport(Artefact):
    """Content of passport.json."""

    source: str
    sha256: str
    rows: Count
    audited: Count
    usable: Count | None = None
    unit: str = "tokens"
    lengths: dict[str, LengthsRecord] = {}
    supervised_share: Number | None = None
    observations: dict[str, Observed] = {}
    findings: list[FindingRecord] = []


class ShownExample(Artefact):
    """Beginning and end of the supervised part of one example of a batch, as the loss sees it."""

    example: str = ""
    tokens: Count | None = None
    supervised_tokens: Count | None = None
    before: str = ""
    begins: str = ""
    ends: str = ""


class BatchAudit(Artefact):
    """Content of batch_audit.json."""

    micro_batches: Count
    examples: Count
    tokens: Count | None = None
    supervised_tokens: Count | None = None
    longest: Count | None = None
    observations: dict[str, Observed] = {}
    shown: list[ShownExample] = []
    findings: list[FindingRecord] = []
    suppressed: list[SuppressedRecord] = []


class DryPassRecord(Artefact):
    """Content of dry_pass.json."""

    tokens: Count
    loss: Number | None = None
    step_seconds: Number | None = None
    eval_seconds: Number | None = None
    eval_batches: Count | None = None
    save_seconds: Number | None = None
    load_seconds: Number | None = None
    checkpoint_bytes: Number | None = None
    phases: dict[str, dict[str, Number]] = {}
    rank: Count | None = None


class TermRecord(Artefact):
    term: str
    bytes: Number
    why: str = ""
    moment: str | None = None


class Device(Artefact):
    name: str
    memory_bytes: Number | None = None


class PlannedModel(Artefact):
    name: str | None = None
    parameters: Number | None = None
    trainable: Number | None = None


class PlannedSteps(Artefact):
    rows: Count | None = None
    total_steps: Count | None = None


class PlannedPhase(Artefact):
    name: str
    allocated_bytes: Number | None = None
    reserved_bytes: Number | None = None


class PlannedPeak(Artefact):
    """The simulated fullest moment of a step, by what the tensors are for."""

    terms: list[TermRecord] = []


class PlannedMemory(Artefact):
    verdict: str = ""
    how: str = ""
    low_bytes: Number
    high_bytes: Number
    phases: list[PlannedPhase] = []
    peak: PlannedPeak | None = None


class PlannedTime(Artefact):
    parts: dict[str, Number] | None = None
    seconds: Number | None = None


class PlanRecord(Artefact):
    """Content of plan.json."""

    estimate: PlannedMemory | None = None
    time: PlannedTime | None = None
    device: Device | None = None
    model: PlannedModel = PlannedModel()
    memory: list[TermRecord] = []
    memory_total_bytes: Number | None = None
    left_out: list[str] = []
    does_not_fit: list[str] = []
    disk: list[TermRecord] = []
    disk_total_bytes: Number | None = None
    disk_free_bytes: Number | None = None
    steps: PlannedSteps = PlannedSteps()


class Event(Artefact):
    """A line of events.jsonl."""

    time: Number
    stage: str
    event: str
    seconds: Number | None = None
    step: Count | None = None
    error: Any = None
    changes: Any = None
    chosen: Number | None = None
    rejected: Number | None = None
    phases: dict[str, dict[str, Number]] = {}


class LayerUse(NamedTuple):
    """Expert load of one layer in one step: `dead` is null if there are too few tokens to tell."""

    layer: Annotated[int, Field(ge=0, le=10**6)]
    experts: Annotated[int, Field(ge=1, le=10**6)]
    max_share: Annotated[float, Field(ge=0, le=1)]
    dead: Annotated[int, Field(ge=0, le=10**6)] | None


class Metrics(Artefact):
    """A line of metrics.jsonl: an optimizer step, or a measurement of the held-out loss with other scores."""

    model_config = ConfigDict(frozen=True, extra="allow")

    step: Count
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: Number | None = None
    tokens_per_second: float | None = None
    seconds: Number | None = None
    memory_bytes: Number | None = None
    disk_free_bytes: Number | None = None
    mfu: float | None = None
    rejected: bool = False
    expert_use: list[LayerUse] = []
    eval_loss: float | None = None


class EnvironmentRecord(Artefact):
    """Content of environment.json."""

    python: str | None = None
    platform: str | None = None
    cpu_count: Count | None = None
    memory_bytes: Number | None = None
    gpus: list[Any] = []
    packages: dict[str, str] = {}
    surefit: str | None = None


class CertificateCheck(Artefact):
    name: str
    value: Any = None
    threshold: Any = None
    comparison: str = ""
    passed: bool
    why: str = ""


class CertifiedGguf(Artefact):
    """The GGUF file that a base was converted from."""

    file: str | None = None
    sha256: str | None = None
    quantization: str | None = None
    dequantized_to: str | None = None

    @property
    def text(self) -> str:
        return f"{self.file}, {self.quantization}, dequantized to {self.dequantized_to}"


class CertifiedBase(Artefact):
    name: str | None = None
    sha256: str | None = None
    gguf: CertifiedGguf | None = None


class CertificateRecord(Artefact):
    """Content of certificate.json."""

    passed: bool
    reason: str = ""
    checks: list[CertificateCheck] = []
    prompts: Count | None = None
    positions: Count | None = None
    base: CertifiedBase = CertifiedBase()
    adapter_sha256: str | None = None
    merged_sha256: str | None = None
    dtype: str | None = None
    seconds: Number | None = None
    quantization: str = "none"
    into: str = "original"
    base_recorded: bool | None = None


class ScoreRecord(Artefact):
    mean: Number
    ci95: Interval | None = None
    n: Count | None = None


class DecodingRecord(Artefact):
    strategy: str | None = None
    max_new_tokens: Count | None = None
    num_beams: Count | None = None
    samples: Count | None = None
    temperature: Number | None = None
    constrained: bool = False


class Evaluation(Artefact):
    """Content of eval/SET/VARIANT.json."""

    set: str
    variant: str
    metrics: dict[str, ScoreRecord]
    recipe: str | None = None
    recipe_version: Count | None = None
    n: Count | None = None
    primary_metric: str | None = None
    truncated: Count | None = None
    unparsed: Count | None = None
    seconds: Number | None = None
    tokens_per_second: Number | None = None
    decoding: DecodingRecord = DecodingRecord()


class ComparisonRecord(Artefact):
    a: str
    b: str
    metric: str
    difference: Number
    ci95: Interval
    wins: Count
    losses: Count
    ties: Count


class FitEffectRecord(Artefact):
    """How much better one model fits the rows' answers than another, in words; `metric_text` where the metric that
    decides shows no clear change."""

    a: str
    b: str
    outcome: Literal["better", "worse", "unclear", "mixed", "wording", "unsure"]
    headline: str
    loss_text: str
    prompt_text: str = ""
    metric_text: str = ""
    n: Count | None = None


class FitRecord(Artefact):
    """How well the models fit the rows' answers; `decides` where no other metric does. `show_more`: what would let
    that metric show an effect."""

    decides: bool
    reason: str = ""
    show_more: Annotated[list[str], Field(max_length=20)] = []
    effects: Annotated[list[FitEffectRecord], Field(max_length=500)] = []


class PairsRecord(Artefact):
    """What the models do with the held-out pairs of a run on preferences."""

    sentences: Annotated[list[str], Field(max_length=100)] = []


class SetSummary(Artefact):
    n: Count | None = None
    pairs: PairsRecord | None = None
    primary_metric: str | None = None
    fit: FitRecord | None = None
    unanswered: Count = 0
    variants: dict[str, dict[str, ScoreRecord]] = {}
    comparisons: list[ComparisonRecord] = []


class Gate(Artefact):
    passed: bool
    outcome: Literal["passed", "failed", "cannot tell"] | None = None
    reason: str = ""

    @property
    def undecided(self) -> bool:
        """Return whether there were too few rows, or no comparable scores, to tell."""
        return self.outcome == "cannot tell"


class Summary(Artefact):
    """Content of eval/summary.json."""

    primary_metric: str
    sets: dict[str, SetSummary]
    gate: Gate | None = None
    left_out: list[str] = []


class PredictionRecord(Artefact):
    """A line of eval/SET/VARIANT.predictions.jsonl."""

    index: Count
    text: str
    where: str | None = None
    prompt: str = ""
    gold: str | None = None
    truncated: bool = False
    scores: dict[str, float] = {}


class CheckpointScore(Artefact):
    """Score of one checkpoint; `there` is False if it has been deleted since."""

    step: Count
    variant: str
    mean: Number
    ci95: Interval
    truncated: Count = 0
    unparsed: Count = 0
    there: bool = True


class Lead(Artefact):
    """Comparison of the best checkpoint with another one."""

    variant: str
    more_than_chance: bool


class BestCheckpoint(Artefact):
    variant: str
    confidence: Number
    over: Annotated[list[Lead], Field(max_length=500)]
    more_than_chance: bool | None = None


class MeanRecord(Artefact):
    """A mean with its interval."""

    mean: Number
    ci95: Interval


class CheckpointScores(Artefact):
    """Content of eval/checkpoints.json."""

    metric: str
    n: Count
    checkpoints: Annotated[list[CheckpointScore], Field(max_length=500)]
    base: MeanRecord | None = None
    best: BestCheckpoint | None = None
