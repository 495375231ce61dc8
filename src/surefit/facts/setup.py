"""The settings of a training run, whichever tool's config states them.

SureFit's own config, Axolotl's, LLaMA-Factory's, TRL's, an Accelerate or DeepSpeed file, an adapter_config.json and a
SLURM script are all converted to a `Setup`, so that one rule judges them all. It includes settings that other tools
have and SureFit's config does not; a value that is not stated is None, and no rule may guess it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from surefit.config.resolve import ResolvedConfig, warmup_steps
from surefit.config.schema import LoraSection, SureFitConfig
from surefit.config.trackers import enabled_trackers
from surefit.config.world import count_data_ranks, count_processes

T = TypeVar("T")


@dataclass(frozen=True)
class SettingLocation:
    """The place of a setting: the key as the user wrote it, its file and 1-based line where they are known."""

    name: str
    path: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Setup:
    """Settings of a training run. Every value is None (or empty) where the file does not state it.

    Attributes:
        tool: surefit, axolotl, llamafactory, swift, trl, accelerate, deepspeed, peft, openai, slurm, python or
            requirements.
        places: attribute → where it is set; `name` is the key to use in messages.
        gone: keys that the tool no longer accepts → what to write instead; each has its place.
        unknown: keys the tool does not know, each with its place; meant: such a key → the key it is probably meant as.
        ignored: keys that have no effect → why; each has its place.
        passed_over: unknown keys that the tool ignores silently; each has its place.
        out_of_range: keys whose number makes no sense → what it should be; each has its place.
        repeated: keys that are set more than once → the lines of the last two; each has its place.
        missing: keys that name a file which does not exist → that file; each has its place.
        deprecated: keys that the tool still accepts → what to write instead; each has its place.
        columns_left_out: columns of the rows that the tool does not read → the entry and the role that would read them.
        gone_imports: names that a script imports and its library no longer has → what to write instead; each has its
            place.

        dtype: dtype of the computation: float32, bfloat16 or float16.
        bf16, fp16: the tool's two switches.
        weights_dtype: the dtype the base's weights are loaded and held in, where the tool sets it apart from `dtype`.
        float32_masters: weights trained in 16 bits have float32 copies that the optimizer updates.
        attention: eager, sdpa, flash_attention_2, flash_attention_3, flex_attention, xformers; SureFit's torch_varlen.
        device_map: a value for from_pretrained: auto, balanced…
        cpu_offload: weights or optimizer are kept in RAM.
        use_cache: the forward pass keeps keys and values while training.
        quantization: nf4, fp4, int8, fp8, gptq, awq; "none" where the file states that there is none.
        quant_compute_dtype, quant_storage: bnb_4bit_compute_dtype, bnb_4bit_quant_storage.
        liger, unsloth: their kernels are enabled.

        adapter: lora, dora, … or full.
        adapter_dtype: dtype of the adapter's weights.
        lora_r, lora_alpha, lora_dropout, rslora, target_modules, modules_to_save: as PEFT names them.
        target_pattern: target_modules as a single text, which PEFT matches with whole names of modules.
        new_tokens: tokens are added to the vocabulary.
        tokens_past_embedding: tokens added to the vocabulary while the embedding keeps its size: "200", "[PAD]".
        trainable_tokens: PEFT's trainable_token_indices are set: single rows of the embedding are trained.
        base_model, base_revision: the model that the adapter belongs to.
        merge_into: the base the adapter will be merged into: original, dequantized or quantized; None: no merge ahead.

        max_length: tokens per example; length_unit: "characters" where rows are filtered by characters.
        packing; packing_strategy: bfd, bfd_split, wrapped…; joined: examples are whole and attend to those before them.
        loss_on: completion, assistant (all assistant turns) or all (the prompt too).
        conversations: the rows are messages.
        collator: the data collator's class.
        pad_is_eos: the padding token is made the end-of-sequence token.
        truncation_side: left or right, where rows over max_length are cut.
        chat_template: a name, file or text that the tool uses instead of the tokenizer's own chat template.
        tokenizer_name: the model whose tokenizer is loaded, where it is set apart from base_model.
        padding_learnt: the labels are a copy of padded ids, padding included.
        eos_token: the token that the tool is configured to end answers with.
        dataloader_workers: processes that load data, per rank.

        epochs, max_steps, total_steps: the length of the run; total_steps in optimizer steps.
        steps_at_most: total_steps is an upper bound, because some of the rows may be left out.
        optimizer: its name in config/optimizers.py; other optimizers are not distinguished.
        preferences: the run learns from preferences, rewards or another model, not from given answers.
        objective: dpo, orpo, simpo, cpo, kto or reward, where the run learns from preferences in one of these ways.
        objective_loss: the form of dpo's loss: sigmoid, ipo, sigmoid_norm, hinge…
        beta: strength of the preference term; target_margin: SimPO's gamma, in units of the reward.
        label_smoothing: share of the pairs that dpo takes to be swapped.
        desirable_weight, undesirable_weight: kto's weights of the two kinds of answers.
        starts_from: the adapter that training continues from.
        reference: what dpo and kto compare the model with, as text; reference_is_start: whether that is the model as
            training begins.
        active_dropout: the rate of a dropout that stays on while the model is compared with a reference.
        likelihood_on: tokens of ORPO's likelihood term: all (the prompt too) or completion.
        learning_rate, warmup_steps: warmup in optimizer steps; warmup_share: as a share of the run.
        micro_batch_times_gpus: the examples per device are multiplied by the number of devices.
        micro_batch, accumulation, world_size, global_batch: examples per forward pass and device, micro batches per
            step, processes that see different rows, examples per optimizer step.
        eval_micro_batch: examples per forward pass in evaluation on the held-out rows.
        eval_strategy, save_strategy: no, steps or epoch; eval_steps, save_steps: optimizer steps between two.
        save_total_limit: checkpoints kept; save_only_model: without optimizer state.
        eval_rows: held-out rows are configured.
        best_model: the best checkpoint is loaded at the end; best_metric: by this metric.
        gradient_checkpointing: of any kind; reentrant: its old implementation.
        resume, overwrite: the run is resumed; the output directory is overwritten.

        generates_in_loop: text is generated while training runs.
        do_sample, temperature: generation settings for scored text.

        parallel: none, dp (torch.nn.DataParallel), device_map, zero1, or one of SureFit's modes.
        processes, machines: over all machines; processes_per_machine. gpus: GPUs requested per machine.
        fsdp_version, fsdp_state_dict, fsdp_offload, fsdp_efficient_loading, fsdp_sync_states.
        fsdp_layers: the classes of the layers that FSDP wraps, by name.
        find_unused_parameters: DDP's switch.
        on_cpu: the run is configured to use no GPU.

        trackers: names of report_to and config/trackers.py; ("all",) where every installed one is used.
        quiet_trackers: trackers that do not prompt for a login.
    """

    tool: str
    places: Mapping[str, SettingLocation] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    meant: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    deprecated: Mapping[str, str] = field(default_factory=dict)
    out_of_range: Mapping[str, str] = field(default_factory=dict)
    repeated: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    gone_imports: Mapping[str, str] = field(default_factory=dict)
    columns_left_out: Mapping[str, str] = field(default_factory=dict)

    dtype: str | None = None
    bf16: bool | None = None
    fp16: bool | None = None
    weights_dtype: str | None = None
    float32_masters: bool | None = None
    attention: str | None = None
    device_map: str | None = None
    cpu_offload: bool | None = None
    use_cache: bool | None = None
    quantization: str | None = None
    quant_compute_dtype: str | None = None
    quant_storage: str | None = None
    liger: bool | None = None
    unsloth: bool | None = None

    adapter: str | None = None
    adapter_dtype: str | None = None
    lora_r: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    rslora: bool | None = None
    target_modules: tuple[str, ...] | None = None
    target_pattern: str | None = None
    modules_to_save: tuple[str, ...] | None = None
    new_tokens: bool | None = None
    tokens_past_embedding: str | None = None
    trainable_tokens: bool | None = None
    base_model: str | None = None
    base_revision: str | None = None
    merge_into: str | None = None

    max_length: int | None = None
    length_unit: str | None = None
    packing: bool | None = None
    packing_strategy: str | None = None
    loss_on: str | None = None
    conversations: bool | None = None
    collator: str | None = None
    pad_is_eos: bool | None = None
    truncation_side: str | None = None
    chat_template: str | None = None
    tokenizer_name: str | None = None
    padding_learnt: bool | None = None
    eos_token: str | None = None
    dataloader_workers: int | None = None

    epochs: float | None = None
    max_steps: int | None = None
    total_steps: int | None = None
    steps_at_most: bool | None = None
    optimizer: str | None = None
    preferences: bool | None = None
    objective: str | None = None
    objective_loss: str | None = None
    beta: float | None = None
    target_margin: float | None = None
    label_smoothing: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    starts_from: str | None = None
    reference: str | None = None
    reference_is_start: bool | None = None
    active_dropout: float | None = None
    likelihood_on: str | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    warmup_share: float | None = None
    micro_batch: int | None = None
    micro_batch_times_gpus: bool | None = None
    accumulation: int | None = None
    world_size: int | None = None
    global_batch: int | None = None
    eval_micro_batch: int | None = None
    eval_strategy: str | None = None
    eval_steps: int | None = None
    eval_rows: bool | None = None
    save_strategy: str | None = None
    save_steps: int | None = None
    save_total_limit: int | None = None
    save_only_model: bool | None = None
    best_model: bool | None = None
    best_metric: str | None = None
    gradient_checkpointing: bool | None = None
    reentrant: bool | None = None
    resume: bool | None = None
    overwrite: bool | None = None

    generates_in_loop: bool | None = None
    do_sample: bool | None = None
    temperature: float | None = None

    parallel: str | None = None
    processes: int | None = None
    machines: int | None = None
    processes_per_machine: int | None = None
    gpus: int | None = None
    fsdp_version: int | None = None
    fsdp_state_dict: str | None = None
    fsdp_offload: bool | None = None
    fsdp_efficient_loading: bool | None = None
    fsdp_sync_states: bool | None = None
    fsdp_layers: tuple[str, ...] | None = None
    find_unused_parameters: bool | None = None
    on_cpu: bool | None = None

    trackers: tuple[str, ...] | None = None
    quiet_trackers: tuple[str, ...] | None = None

    @property
    def package(self) -> str:
        """Name of the package that is installed where the tool is used on this machine."""
        return "trl" if self.tool == "python" else self.tool

    def name(self, attribute: str) -> str:
        """Return the user's key for an attribute; the attribute's own name where the file does not set it."""
        place = self.places.get(attribute)
        return place.name if place else attribute


COMPARED = ("dpo", "kto")
"""Objectives that compare the model with a reference."""
_KEYS = {
    "dtype": "model.dtype", "attention": "speed.attention", "quantization": "model.quantization",
    "adapter": "train.method", "lora_r": "lora.r", "lora_alpha": "lora.lora_alpha",
    "lora_dropout": "lora.lora_dropout", "rslora": "lora.use_rslora",
    "target_modules": "lora.target_modules", "base_model": "model.name_or_path",
    "base_revision": "model.revision", "merge_into": "model.quantization", "max_length": "data.max_length",
    "packing": "data.packing", "epochs": "train.num_train_epochs", "max_steps": "train.max_steps",
    "objective": "objective.name", "objective_loss": "objective.loss_type", "beta": "objective.beta",
    "target_margin": "objective.gamma_beta_ratio", "label_smoothing": "objective.label_smoothing",
    "desirable_weight": "objective.desirable_weight", "undesirable_weight": "objective.undesirable_weight",
    "starts_from": "lora.start_from",
    "optimizer": "train.optim", "learning_rate": "train.learning_rate", "warmup_steps": "train.warmup_steps",
    "micro_batch": "train.per_device_train_batch_size", "global_batch": "train.global_batch_size",
    "gradient_checkpointing": "train.gradient_checkpointing", "save_steps": "checkpoint.save_steps",
    "eval_steps": "checkpoint.save_steps", "save_total_limit": "checkpoint.save_total_limit",
    "do_sample": "evaluate.temperature", "temperature": "evaluate.temperature",
    "best_model": "checkpoint.metric_for_best_model", "best_metric": "checkpoint.metric_for_best_model",
    "generates_in_loop": "evaluate.in_training", "trackers": "telemetry", "parallel": "parallel.mode",
    "cpu_offload": "parallel.offload",
    "processes": "hardware.count", "machines": "hardware.nodes", "on_cpu": "hardware.gpu",
}  # fmt: skip
"""Attribute → the dotted key of SureFit's config that sets it."""


def setup_of(config: SureFitConfig, resolved: ResolvedConfig | None) -> Setup:
    """Return SureFit's own config as a `Setup`, including what its design fixes (masked prompts, greedy scoring)."""
    decided = resolved.config if resolved else config
    model, train, checkpoint = decided.model, decided.train, decided.checkpoint
    total = resolved.total_steps if resolved else None
    dtype, attention = _known(model.dtype), _known(decided.speed.attention)
    quantized, mode = model.quantization != "none", _known(decided.parallel.mode)
    save_steps, packing = _known(checkpoint.save_steps), _known(decided.data.packing)
    recompute, warms_up = train.gradient_checkpointing, train.lr_scheduler_type != "constant"
    trackers = enabled_trackers(decided.telemetry)
    return Setup(
        tool="surefit",
        places={attribute: SettingLocation(key) for attribute, key in _KEYS.items()},
        dtype=dtype,
        float32_masters=True,
        attention=attention,
        use_cache=False,
        new_tokens=bool(model.add_tokens) or None,
        trainable_tokens=(bool(model.add_tokens) and decided.train.method == "lora") or None,
        quantization=model.quantization,
        quant_compute_dtype=dtype if quantized else None,
        quant_storage="uint8" if model.quantization == "nf4" else None,
        base_model=model.name_or_path,
        base_revision=model.revision,
        max_length=decided.data.max_length,
        length_unit="tokens",
        packing=packing,
        packing_strategy="bfd" if packing else None,
        epochs=_known(train.num_train_epochs),
        max_steps=train.max_steps,
        total_steps=total,
        optimizer=train.optim,
        learning_rate=train.learning_rate,
        warmup_steps=warmup_steps(total, train.warmup_steps) if total and warms_up else None,
        micro_batch=_known(train.per_device_train_batch_size),
        # Where the micro batches do not divide the batch, some processes run an empty one: no product can be compared.
        accumulation=resolved.gradient_accumulation_steps if resolved and _divides(decided) else None,
        world_size=count_data_ranks(decided),
        global_batch=_known(train.global_batch_size),
        save_steps=save_steps,
        eval_steps=save_steps,
        eval_rows=not config.data.holds_nothing_out,
        save_total_limit=checkpoint.save_total_limit,
        best_model=checkpoint.metric_for_best_model is not None,
        best_metric=checkpoint.metric_for_best_model,
        gradient_checkpointing=None if recompute == "auto" else recompute is not False,
        generates_in_loop=decided.evaluate.in_training,
        do_sample=decided.evaluate.temperature > 0 and decided.evaluate.samples == 1,
        temperature=decided.evaluate.temperature or None,
        parallel=None if mode is None else {"single": "none"}.get(mode, mode),
        cpu_offload=decided.parallel.offload,
        processes=count_processes(decided),
        machines=decided.hardware.nodes,
        on_cpu=decided.hardware.gpu == "cpu",
        find_unused_parameters=False,
        reentrant=False,
        trackers=tuple(trackers),
        quiet_trackers=tuple(name for name, tracker in trackers.items() if not tracker.asks(decided.telemetry)),
        **_adapter_of(decided.adapter, dtype, quantized),
        **_objective_of(decided),
    )


def _divides(config: SureFitConfig) -> bool:
    micro, batch = config.train.per_device_train_batch_size, config.train.global_batch_size
    return isinstance(micro, int) and isinstance(batch, int) and batch % (micro * count_data_ranks(config)) == 0


def _adapter_of(section: LoraSection | None, dtype: str | None, quantized: bool) -> dict[str, Any]:
    """Return the adapter's settings; the factors have the dtype that the base computes in, not its storage dtype."""
    if section is None:
        return {"adapter": "full"}
    modules = section.target_modules
    return {
        "adapter": "dora" if section.use_dora else "lora",
        "adapter_dtype": dtype,
        "lora_r": section.r,
        "lora_alpha": section.lora_alpha,
        "lora_dropout": section.lora_dropout,
        "rslora": section.use_rslora,
        "target_modules": (modules,) if isinstance(modules, str) else tuple(modules),
        "merge_into": "dequantized" if quantized else "original",
    }


def _objective_of(config: SureFitConfig) -> dict[str, Any]:
    """Return the objective's settings; nothing for sft. SureFit's reference is the model as training begins."""
    objective = config.objective
    if objective.name == "sft":
        return {}
    beta = _known(objective.beta)
    margin = objective.gamma_beta_ratio * beta if objective.name == "simpo" and beta is not None else None
    compares = objective.name in COMPARED
    return {
        "preferences": True,
        "objective": objective.name,
        "objective_loss": objective.loss_type if objective.name == "dpo" else None,
        "beta": beta,
        "target_margin": margin,
        "label_smoothing": objective.label_smoothing,
        "desirable_weight": objective.desirable_weight if objective.labelled else None,
        "undesirable_weight": objective.undesirable_weight if objective.labelled else None,
        "starts_from": config.adapter.start_from if config.adapter else None,
        "reference": "the model as training begins" if compares else None,
        "reference_is_start": True if compares else None,
        "likelihood_on": "completion" if objective.name == "orpo" else None,
    }


def _known(value: T | Literal["auto"]) -> T | None:
    return None if value == "auto" else value
