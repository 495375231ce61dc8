"""Schema of a config file: the settings, their allowed values, and what each one does.

One class per section; `surefit init` and the docs show the docstring under each field. Validators look at one section
and never change a value: checks across sections are lint rules, and every `auto` is decided in `resolve.py`. Names are
the ones Hugging Face users know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, field_validator, model_validator

from surefit.config.modes import ModeName
from surefit.config.optimizers import OptimizerName
from surefit.config.section import Section
from surefit.config.trackers import TelemetrySection
from surefit.core.units import bytes_of


def _as_a_file_system_takes_it(path: str) -> str:
    """Raise for a path over Linux's `NAME_MAX` or `PATH_MAX`, which would fail at its first use."""
    name = max((part.encode(errors="surrogatepass") for part in path.split("/")), key=len)
    if len(name) > 255 or len(path.encode(errors="surrogatepass")) > 4095:
        raise ValueError(f"a path has at most 255 bytes between two slashes, and 4,095 in all: {path[:40]}…")
    if "\0" in path:
        raise ValueError("a path has no NUL character in it")
    return path


def _on_one_line(value: object) -> object:
    """Raise if a text for a batch script has several lines: a second line would be a command."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (not text.strip() or not text.isprintable()):
            problem = "has a line break or another control character in it" if text.strip() else "is empty"
            raise ValueError(f"{text!r:.60} {problem}: the batch script takes one line of plain text")
    return value


def _number_as_text(value: object) -> object:
    """Convert an integer to text, because YAML parses 4090 as a number."""
    return str(value) if type(value) is int else value


def _size_with_unit(text: str) -> str:
    bytes_of(text)
    return text


def _null_as_zero(value: object) -> object:
    """Return 0 for null: `eval: null` means the same as `eval: 0`, that nothing is held out."""
    if isinstance(value, str) and value.strip().lower() in ("", "none", "no", "off"):
        raise ValueError(f"{value!r} is not a file of rows: write 0 to hold nothing out")
    return 0.0 if value is None else value


Auto = Literal["auto"]
T = TypeVar("T", int, float)


def decided(value: T | Auto) -> T:
    """Return a value that may be "auto" in a config file, from a config in which it is decided."""
    assert value != "auto", "the config is not resolved"
    return value


Dtype = Literal["float32", "bfloat16", "float16"]
_HOLDS_A_SECRET = re.compile(
    r"(\w*(?:TOKEN|API_?KEY|_KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?))=(?!\$)\S", re.IGNORECASE
)
PathText = Annotated[str, AfterValidator(_as_a_file_system_takes_it)]


TEMPLATE_OWN = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
    "pad_token", "unk_token", "raise_exception", "strftime_now", "namespace", "range", "true", "false", "none", "True",
    "False", "None", "not", "and", "or", "if", "else", "in", "is",
}  # fmt: skip
"""Names that every chat template receives, or that have another meaning in Jinja."""


def _can_be_set(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]{0,99}", name) or name in TEMPLATE_OWN:
        raise ValueError(f"{name!r:.60} is not a switch of a chat template")
    return name


Switch = Annotated[str, AfterValidator(_can_be_set)]
SwitchValue = bool | Annotated[int, Field(ge=-(10**9), le=10**9)] | Annotated[str, Field(pattern=r"^[ -~]{0,200}$")]


NewToken = Annotated[str, Field(min_length=1, max_length=200)]


class ModelSection(Section):
    """The base model."""

    name_or_path: PathText
    """A directory, a GGUF file, a hub id, surefit/nano (built in), or surefit/smollm2-135m-instruct (a real one)."""
    revision: str | None = None
    """The hub revision (branch, tag or commit) to pin."""
    dtype: Auto | Dtype = "auto"
    """Data type of the weights and of the computation."""
    quantization: Literal["none", "nf4", "fp8"] = "none"
    """Storage of the frozen weights under an adapter: nf4 needs a quarter of bfloat16's memory, fp8 half."""
    chat_template: PathText | None = None
    """Write conversations with this Jinja file; where a base model has no template of its own, with `plain`, or with
    `chatml` or `llama3` if it has their tokens."""
    chat_template_kwargs: dict[Switch, SwitchValue] = Field(default_factory=dict)
    """Switches of the chat template, such as {enable_thinking: false}: for training, answers and the merged model."""
    add_tokens: Annotated[list[NewToken], Field(max_length=10_000)] = Field(default_factory=list)
    """Tokens to append to the vocabulary, such as ["<call>", ":ARG0-of"]. Their rows of the embedding and the head
    start at the mean of the pieces that the text was split into before, and are trained."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave it off unless you have read that code."""

    @field_validator("add_tokens")
    @classmethod
    def _are_tokens(cls, tokens: list[str]) -> list[str]:
        for token in tokens:
            if not token.strip() or tokens.count(token) > 1:
                raise ValueError(f"{token!r:.60} {'is written twice' if token.strip() else 'has no text'}")
        return tokens


STACKED = (
    "a run starts from one adapter, or from fresh factors: merge the others first, `surefit merge ADAPTER --base "
    "MODEL` (`--with OTHER` adds them up), and name the merged model as model.name_or_path"
)
"""Help for a config that names several adapters."""


class LoraSection(Section):
    """The low-rank factors that `train.method: lora` trains (LoRA, Hu et al. 2021)."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """The rank of the LoRA factors."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e9)] = 32.0
    """The LoRA update is scaled by alpha / r; with `use_rslora` by alpha / √r."""
    use_rslora: bool = False
    """Scale by alpha / √r (rsLoRA, Kalajdzievski 2023), so that a higher rank does not learn more slowly."""
    use_dora: bool = False
    """Train the magnitude and the direction of an adapted matrix's rows separately (DoRA, Liu et al. 2024): slower."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the input of the LoRA factors."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers with LoRA factors: all but the output head, or a list of module name endings."""
    experts: bool | Literal["with_router"] = False
    """In a mixture of experts, give every routed expert LoRA factors too: they hold most of the weights, and each
    expert gets its own factors. with_router: the routers as well; otherwise they stay as they are."""
    start_from: PathText | None = None
    """The directory of a trained adapter to continue from, instead of fresh factors; same rank, same layers."""


class DataSection(Section):
    """The rows to train on and to be scored on."""

    train: PathText
    """A .jsonl, .json, .parquet or .csv file, a directory of them, a hub data set id, or a surefit/… sample."""
    eval: Annotated[Annotated[float, Field(ge=0, lt=1)] | PathText, BeforeValidator(_null_as_zero)] = 0.02
    """The held-out rows: another file, or the share of the training rows to set aside (with several tasks, of every
    source). 0 or null holds nothing out: all rows are trained on, and no loss or score is measured on held-out rows."""
    format: Literal[
        "auto",
        "recipe",
        "messages",
        "prompt_completion",
        "tokens",
        "text",
        "alpaca",
        "sharegpt",
        "gemini",
        "pairs",
        "openai_pairs",
        "swift_pairs",
        "scored_answers",
    ] = "auto"
    """Format of the rows; auto detects it by the column names."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns with other names than those of the format: prompt: question, completion: answer. For messages also their
    keys, role and content."""
    roles: dict[Literal["system", "user", "assistant", "tool"], str] = Field(default_factory=dict)
    """Roles with other names in the messages of the rows: assistant: agent."""
    mix: dict[PathText, Annotated[float, Field(gt=0, le=1e6)]] = Field(default_factory=dict)
    """More training rows by path or id, each with how often one epoch sees them: 1 is once, 0.25 a fixed quarter."""
    split: str = "train"
    """Split of a hub data set to train on."""
    tokenized: PathText | None = None
    """The directory of token shards that `surefit prepare` writes and training reads instead of `train` and `mix`: for
    more rows than fit in memory, or many machines."""
    limit: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Use this many rows of `train` at most, taken evenly from all: for a first try. A held-out share is of these."""
    max_length: Annotated[int, Field(ge=8, le=2**30)] = 2048
    """Tokens per example, prompt and answer together."""
    packing: Auto | bool = "auto"
    """Concatenate the examples of a micro batch instead of padding them; what is learned does not change."""
    thinking: Literal["keep", "drop", "only_last"] = "keep"
    """Handling of rows with reasoning: keep, learn every assistant turn with the reasoning it has; drop, the answers
    without any; only_last, only the last turn of each conversation, with its reasoning.
    """
    too_long: Literal["drop", "error", "truncate", "truncate_middle"] = "drop"
    """Handling of an example over max_length: leave it out (counted) or stop; or keep the beginning of its document
    (truncate), or its beginning and end (truncate_middle), for recipes that have documents. No answer is ever cut.
    """
    bad_rows: Literal["error", "skip"] = "error"
    """Handling of a row that cannot be used: stop and name it, or leave it out (counted and reported)."""

    @field_validator("columns", "roles")
    @classmethod
    def _names_are_distinct(cls, names: dict[str, str]) -> dict[str, str]:
        for name, theirs in names.items():
            first = next(other for other, value in names.items() if value == theirs)
            if first != name:
                raise ValueError(f"{theirs!r} is named twice: for {first} and for {name}")
        return names

    @property
    def share(self) -> float | None:
        """Return the share of the training rows that is held out; None where nothing is, or the held-out rows are a
        file.
        """
        return self.eval if isinstance(self.eval, float) and self.eval > 0 else None

    @property
    def holds_nothing_out(self) -> bool:
        """Return whether all rows are trained on and there are no held-out rows."""
        return self.eval == 0

    @property
    def cuts(self) -> bool:
        """Return whether documents that are too long are truncated."""
        return self.too_long.startswith("truncate")


SchedulerName = Literal["cosine", "linear", "constant", "constant_with_warmup", "warmup_stable_decay"]
"""Values of `train.lr_scheduler_type`."""


class TrainSection(Section):
    """The optimization."""

    method: Literal["lora", "full"] = "lora"
    """lora trains low-rank factors beside frozen weights; full trains every weight."""
    num_train_epochs: Auto | Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Passes over the training rows. auto: 3; up to 10 where that is fewer than 100 steps, fewer above 25,000 rows."""
    max_steps: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """At most this many optimizer steps; a run whose epochs end earlier ends with them."""
    learning_rate: Annotated[float, Field(gt=0, lt=10)] = 2e-4
    """The peak learning rate."""
    global_batch_size: Auto | Annotated[int, Field(ge=1, le=2**20)] = 64
    """Examples per optimizer step, over all devices and accumulation: the batch the optimizer sees. auto: a fiftieth of
    the rows, from 4 to 64."""
    per_device_train_batch_size: Auto | Annotated[int, Field(ge=1, le=2**20)] = "auto"
    """Examples per forward pass (micro batch); must divide global_batch_size. Packed: this many × max_length tokens."""
    gradient_checkpointing: Auto | bool | Literal["selective", "offload"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. selective keeps attention's
    outputs; offload also moves what is kept to the host's memory."""
    optim: OptimizerName = "adamw_torch"
    """AdamW (Loshchilov & Hutter 2019), betas 0.9 and 0.999; with 8-bit moments, or moments paged to the host."""
    lr_scheduler_type: SchedulerName = "cosine"
    """Schedule of the learning rate from its peak to zero after the warmup, by transformers' names.
    constant_with_warmup keeps the peak, warmup_stable_decay until `decay_steps` begin; constant has no warmup.
    """
    warmup_steps: Annotated[float, Field(ge=0, le=1e9)] = 0.03
    """Below 1: the share of all steps over which the rate rises from zero; 1 or more: the number of steps."""
    decay_steps: Annotated[float, Field(gt=0, le=1e9)] = 0.2
    """For warmup_stable_decay. Below 1: the share of all steps over which the rate falls to zero at the end; 1 or more:
    the number."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decoupled weight decay; biases and norm weights are exempt."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    """Gradients are scaled down to this norm."""
    neftune_noise_alpha: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Noise on the input embeddings (NEFTune, Jain et al. 2023); 5 is usual."""
    eval_steps: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Also measure the held-out loss every this many optimizer steps; it is measured at every checkpoint anyway."""
    early_stopping_patience: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Stop after this many measurements in a row without a better `checkpoint.metric_for_best_model` (or held-out
    loss)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the order of the rows, the LoRA initialization and dropout."""


ObjectiveName = Literal["sft", "dpo", "orpo", "simpo", "kto"]
"""Values of `objective.name`."""


PAIR_METRICS = ("eval_rewards/accuracies", "eval_rewards/margins")
"""Metrics of held-out pairs by which a checkpoint can be the best: higher is better."""
LABEL_METRICS = ("eval_rewards/auc", "eval_rewards/margins")
"""The same of held-out rows with a label."""


class ObjectiveSection(Section):
    """What training optimizes: the likelihood of the answers, or the preference of one answer over another."""

    name: ObjectiveName = "sft"
    """sft: cross-entropy of the answers. dpo, orpo, simpo: pairs, rows with a chosen and a rejected answer. kto: rows
    with one answer and a label, true for a desirable one."""
    loss_type: Literal["sigmoid", "ipo", "sigmoid_norm"] = "sigmoid"
    """dpo: sigmoid (Rafailov et al. 2023), ipo (Azar et al. 2023), or sigmoid_norm, which divides log-probabilities by
    the answer's length."""
    beta: Auto | Annotated[float, Field(gt=0, le=100)] = "auto"
    """Strength of the preference term. auto: 0.1 for dpo (sigmoid, ipo), orpo and kto, 5 for sigmoid_norm, 2 for
    simpo."""
    gamma_beta_ratio: Annotated[float, Field(ge=0, le=100)] = 0.5
    """simpo: target margin, divided by beta, in nats per token."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo with sigmoid: assumed share of pairs whose answers were swapped."""
    sft_weight: Annotated[float, Field(ge=0, le=100)] = 0.0
    """dpo, simpo: weight of the cross-entropy of the chosen answers, added to the preference term; orpo's is 1."""
    desirable_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """kto: weight of the losses of desirable answers."""
    undesirable_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """kto: weight of the losses of undesirable answers."""

    @property
    def paired(self) -> bool:
        """Return whether the rows are pairs, a chosen and a rejected answer to the same prompt."""
        return self.name in ("dpo", "orpo", "simpo")

    @property
    def labelled(self) -> bool:
        """Return whether the rows are single answers, each with a label that says whether it is desirable."""
        return self.name == "kto"

    @property
    def examples_name(self) -> str:
        """Return what an example of this objective is called, in the plural."""
        return "pairs" if self.paired else "labelled answers" if self.labelled else "examples"

    @property
    def answers_per_example(self) -> int:
        """Return the number of token sequences that an example of this objective is."""
        return 2 if self.paired else 1

    @property
    def always_measured(self) -> tuple[str, ...]:
        """Return the metrics of held-out rows that every run measures, without generating answers."""
        others = PAIR_METRICS if self.paired else LABEL_METRICS if self.labelled else ("eval_perplexity",)
        return ("eval_loss", *others)

    @property
    def has_reference(self) -> bool:
        """Return whether the objective compares the model with a reference."""
        return self.name in ("dpo", "kto")

    @property
    def read_keys(self) -> frozenset[str]:
        """Return the keys of this section that the objective reads."""
        if self.name == "sft":
            return frozenset({"name"})
        keys = {"name", "beta"}
        if self.name == "kto":
            keys |= {"desirable_weight", "undesirable_weight"}
        if self.name == "dpo":
            keys |= {"loss_type", "sft_weight"} | ({"label_smoothing"} if self.loss_type == "sigmoid" else set())
        if self.name == "simpo":
            keys |= {"gamma_beta_ratio", "sft_weight"}
        return frozenset(keys)


def _name_alone(value: object) -> object:
    """Return {name: value} for text: `objective: dpo` is short for `objective: {name: dpo}`."""
    return {"name": value} if isinstance(value, str) else value


class SpeedSection(Section):
    """Implementation of the arithmetic: nothing here changes what is learned beyond rounding."""

    attention: Auto | Literal["torch_varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """The attention code; auto needs nothing but torch."""
    chunked_loss: bool = True
    """Never hold the logits of all tokens: the loss and its gradient are computed a chunk at a time."""
    fused_lora: Auto | bool = "auto"
    """One forward and backward for the LoRA factors of projections that read the same input."""
    kernels: Auto | bool = "auto"
    """Fused GPU kernels for norms, rope and gated MLPs; they need the extra `kernels`, and auto uses them from Ampere
    on if it is installed."""
    compile: bool = False
    """torch.compile the decoder layers."""
    tiled_mlp: Auto | bool = "auto"
    """Run the MLPs a block of tokens at a time: for contexts so long that one layer's activations are too large."""
    shared_prompts: Auto | bool = "auto"
    """Packed pairs: compute a prompt once for both of its answers. auto: on a CPU; on a GPU it is not measured yet."""


class HardwareSection(Section):
    """The devices to train on."""

    gpu: Annotated[str, BeforeValidator(_number_as_text)] = "auto"
    """auto uses the GPU of this machine if there is one; cpu forces the CPU; a name such as h100 plans for that GPU."""
    disk: Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_size_with_unit)] | None = None
    """Free disk space of the machine that trains, such as 100GB, for checkpoints and the model's download; without it
    this machine's counts, unless `gpu` names a GPU that is not here."""
    count: Auto | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Devices (with gpu: cpu, processes) on each node; auto is one. `surefit train --gpus N` sets it."""
    nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Machines; more than one is started by `surefit slurm`, srun or torchrun."""


class ParallelSection(Section):
    """Distribution of the work over several devices."""

    mode: Auto | ModeName = "auto"
    """Parallel mode: what is divided among the processes; `reference/combinations.md` lists the modes and what each
    allows.
    """
    tp: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Devices that share each matrix."""
    cp: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Devices that share the tokens of each example, each with the whole model or, with mode: fsdp, a shard of it."""
    pp: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Devices that share the layers."""
    dp_replicate: Annotated[int, Field(ge=1, le=2**20)] = 1
    """With fsdp: groups of devices that each hold a whole sharded model."""
    offload: bool = False
    """Keep in the host's memory what the mode shards: fsdp's, or DeepSpeed's."""
    timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """Minutes that a process waits for the others before the run is stopped."""
    accelerate_config: PathText | None = None
    """An Accelerate YAML file whose settings take precedence over this section's."""
    deepspeed_config: PathText | None = None
    """A DeepSpeed JSON file, "auto" allowed, whose settings take precedence over this section's."""


class SlurmSection(Section):
    """Resources that `surefit slurm` requests."""

    partition: str | None = None
    """The partition to run in."""
    account: str | None = None
    """The account to charge."""
    time: str = "24:00:00"
    """The time limit of a job, in sbatch's format; a run that needs more is requeued and resumes."""
    cpus_per_gpu: Annotated[int, Field(ge=1, le=4_096)] = 8
    """CPU cores per device."""
    memory: str | None = None
    """RAM per node, in sbatch's format, such as 200G."""
    modules: list[str] = Field(default_factory=list)
    """Environment modules to load."""
    venv: PathText | None = None
    """The virtual environment to activate; the submitting process's if not set."""
    signal_seconds: Annotated[int, Field(ge=1, le=65_535)] = 120
    """Seconds before the end of its time limit at which a job gets the signal to save and requeue itself."""
    options: list[str] = Field(default_factory=list)
    """More #SBATCH lines, such as --constraint=a100."""

    _plain = field_validator("*")(_on_one_line)

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: list[str]) -> list[str]:
        for option in options:
            if not re.match(r"--?[A-Za-z]", option):
                raise ValueError(f"{option!r:.60} is not an sbatch option: those begin with - or --")
            if name := _HOLDS_A_SECRET.search(option):
                raise ValueError(
                    f"{name[1]} and its value would be in the batch script, where everyone can read it: put it into "
                    "the environment, which SLURM passes on"
                )
        return options


class CheckpointSection(Section):
    """Checkpoints during training."""

    save_steps: Auto | Annotated[int, Field(ge=1, le=10**9)] = "auto"
    """Optimizer steps between checkpoints; the held-out loss is measured at the same steps."""
    save_total_limit: Annotated[int, Field(ge=1, le=10**6)] = 2
    """Number of checkpoints to keep."""
    metric_for_best_model: str | None = None
    """Keep the best checkpoint too, and export it: eval_loss, or a metric of the recipe (`evaluate.in_training`)."""
    best_total_limit: Annotated[int, Field(ge=1, le=10**6)] = 1
    """With metric_for_best_model: number of the best checkpoints to keep beside the newest."""


class GateSection(Section):
    """The condition under which `evaluate` exits with 0: with 1 where it fails, with 5 where the rows cannot tell."""

    metric: str | None = None
    """The metric to look at; the recipe's primary metric if not set: for free-text answers the one that their length
    chooses, answer_likelihood or exact_match."""
    min: Annotated[float, Field(ge=0, le=1)] | None = None
    """The tuned model must score at least this."""
    not_worse_than: PathText | None = None
    """base, a baseline of the recipe, or another run's directory: pass when the tuned model is surely not worse by more
    than `margin`, fail when it is surely worse. With several tasks, each one is tested, unless `metric` is set."""
    margin: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The largest accepted loss of score, 0.05 being 5 points; a smaller one needs more rows to rule out."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """The confidence level of the intervals that `min` and `not_worse_than` look at."""


class EvaluateSection(Section):
    """Scoring of the base, adapter and merged models."""

    max_examples: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Score only this many held-out rows, taken evenly from the whole set."""
    max_new_tokens: Annotated[int, Field(ge=1, le=2**24)] = 256
    """Answers longer than this are cut and counted as truncated."""
    batch_size: Auto | Annotated[int, Field(ge=1, le=2**16)] = "auto"
    """Prompts per generation batch."""
    constrained: Literal["none", "only", "both"] = "none"
    """Let the model write only what the recipe's grammar allows (JSON by schema, PENMAN, labels); both scores both."""
    num_beams: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Beam search with this many beams; 1 is greedy."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Answers per prompt, for pass@k; more than one needs a temperature."""
    temperature: Annotated[float, Field(ge=0, le=1_000)] = 0.0
    """0 is greedy decoding; above it answers are sampled, with the seed `train.seed`."""
    prefill_chunk: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Read prompts this many tokens at a time: less memory for very long ones, the same answers."""
    chat_template_kwargs: dict[Switch, SwitchValue] = Field(default_factory=dict)
    """Switches of the chat template for answers only, instead of those in `model.chat_template_kwargs`."""
    server: str | None = None
    """Ask an OpenAI-compatible server (vLLM, SGLang) at this URL for the tuned model; its key: SUREFIT_API_KEY."""
    in_training: bool = False
    """Also answer the held-out prompts at every checkpoint, and log the scores. Slow: it generates text."""
    extra_sets: dict[str, PathText] = Field(default_factory=dict)
    """More sets to score, by name: for example what the base model could already do."""
    gate: GateSection | None = None
    """Turn the scores into an exit code."""

    @model_validator(mode="after")
    def _names_are_usable_as_folders(self) -> EvaluateSection:
        for name in self.extra_sets:
            if name == "eval" or not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"the name {name!r} cannot be used: letters, digits, - and _, and not 'eval'")
        return self


class LintSection(Section):
    """Findings of `surefit check` that are known and accepted."""

    ignore: dict[str, str] = Field(default_factory=dict)
    """Rule code → why its findings do not matter for this run. The reason must be given, and the report shows it."""

    @field_validator("ignore")
    @classmethod
    def _every_code_has_a_reason(cls, ignore: dict[str, str]) -> dict[str, str]:
        for code, reason in ignore.items():
            if not reason.strip():
                raise ValueError(f"ignoring {code} needs a reason: write why its findings do not matter here")
        return ignore


class SureFitConfig(Section):
    """One run."""

    recipe: str = "chat"
    """The task: how rows become messages and answers become scores (`surefit init --list` names them). Several joined
    by + are trained in one run, each row by the task whose columns it has."""
    model: ModelSection
    """The base model."""
    lora: LoraSection = LoraSection()
    """The LoRA factors that are trained, with `train.method: lora`."""
    data: DataSection
    """The rows to train on and to be scored on."""
    train: TrainSection = TrainSection()
    """The optimization."""
    objective: Annotated[ObjectiveSection, BeforeValidator(_name_alone)] = ObjectiveSection()
    """What training optimizes."""
    speed: SpeedSection = SpeedSection()
    """Implementation of the arithmetic."""
    hardware: HardwareSection = HardwareSection()
    """The devices to train on."""
    parallel: ParallelSection = ParallelSection()
    """Distribution of the work over several devices."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints during training."""
    evaluate: EvaluateSection = EvaluateSection()
    """Scoring of the base, adapter and merged models."""
    telemetry: TelemetrySection = TelemetrySection()
    """Further places to log a run's metrics to."""
    slurm: SlurmSection = SlurmSection()
    """Resources that `surefit slurm` requests."""
    lint: LintSection = LintSection()
    """Findings of `surefit check` that are known and accepted."""
    output_dir: PathText
    """The run directory."""

    @property
    def adapter(self) -> LoraSection | None:
        """Return the LoRA section, where its factors are trained; None where every weight is trained."""
        return self.lora if self.train.method == "lora" else None

    @property
    def answering(self) -> ModelSection:
        """Return the model section with the chat template's switches for answers."""
        switches = self.model.chat_template_kwargs | self.evaluate.chat_template_kwargs
        return self.model.model_copy(update={"chat_template_kwargs": switches})


def path_texts(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every config value that may name a path: found by its type, `PathText`."""
    for name, field in type(section).model_fields.items():
        value, dotted = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from path_texts(value, f"{dotted}.")
        elif _is_path(field.annotation, field.metadata):
            texts = value.items() if isinstance(value, dict) else [("", value)]
            for key, inner in texts:
                if isinstance(inner, str):
                    yield f"{dotted}.{key}" if key else dotted, inner
                elif key:
                    yield dotted, key


def _is_path(annotation: Any, metadata: Sequence[object] = ()) -> bool:
    """Return whether `PathText` is anywhere in a type; pydantic keeps the outermost `Annotated` apart, as metadata."""
    if PathText.__metadata__[0] in (*metadata, *getattr(annotation, "__metadata__", ())):  # type: ignore[attr-defined]
        return True
    return any(_is_path(part) for part in get_args(annotation))
