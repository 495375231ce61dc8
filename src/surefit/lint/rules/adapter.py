"""ADP: adapters, and other weights that are trained beside the frozen base."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefit.config.schema import STACKED, LoraSection, SureFitConfig
from surefit.core.errors import SureFitError
from surefit.core.reading import read_json_file
from surefit.core.units import bytes_text, count_text
from surefit.facts.all_linear import FUSED_IN_FILES, closed_to_lora, without_gradient
from surefit.facts.experts import experts_of
from surefit.facts.lora_settings import (
    MERGE_IT,
    PREFIX,
    adapters_below,
    describe_nested_adapters,
    find_non_lora_setting,
    find_setting_blocking_training,
    matching_exactly,
    modules_with_factors,
)
from surefit.facts.memory_formula import MOMENTS, OUTPUT_HEADS, count_trainable_parameters, target_modules
from surefit.facts.model import ModelFacts
from surefit.facts.safetensors import read_header
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, find_refused_combinations, rule

SCALES = (1 / 64, 32)
"""Range of alpha / r that is known to train: PEFT's default alpha of 8 at rank 512, and alpha 32 at rank 1."""
KNOWN = "settings that are known to train lie between 0.06 and 32"
STABILISED = 16
"""alpha / √r for alpha = r at rank 256; a larger value suggests that alpha was chosen for alpha / r."""
FROZEN_STORAGE = ("nf4", "fp4", "int8", "gptq", "awq")
"""Storage formats of weights that cannot represent a gradient step."""
STORED_QUANTIZED = ("bitsandbytes", "gptq", "awq")
"""Names of such formats in a model's config.json."""
ABSURD = 2**31
"""Numbers from here on are typos that every tool rejects by itself; dividing them could overflow."""


@rule("ADP001", "alpha-extreme", severity="warning")
def alpha_extreme(setup: Setup) -> Iterator[Finding]:
    """The adapter's scale, alpha divided by rank, is far outside the range that is known to work.

    ## What it does
    Divides alpha by the rank and fires above 32 and below 1/64; with rank-stabilized LoRA it divides by the square
    root of the rank, and fires above 16.

    ## Why it is bad
    The adapter's output is multiplied by it. If it is far too large, the first steps destroy what the model knows; if
    it is far too small, the adapter has no effect at any usual learning rate.

    ## Example
    `r: 8` with `lora_alpha: 512`, or an alpha of 1 left unchanged when the rank was raised to 256. `use_rslora: true`
    with `r: 256` and `lora_alpha: 512`: plain LoRA would scale by 2, rank-stabilized LoRA scales by 32.

    ## Fix
    Start at alpha = 2 × r; with rank-stabilized LoRA, at alpha = 16 for every rank.

    ## Evidence
    Published settings lie between 0.06 and 32: alpha 32 at ranks from 512 down to 1 ("LoRA Without Regret", Schulman et
    al. 2025). Rank-stabilized LoRA divides by the square root, so that one alpha suits every rank (Kalajdzievski
    2023, https://arxiv.org/abs/2312.03732). Blaizzy/mlx-vlm#841: a scale eight times too large made the default
    settings' adapters unusable.
    """
    rank, alpha = setup.lora_r, setup.lora_alpha
    if setup.adapter == "full" or rank is None or alpha is None or not (0 < rank < ABSURD and abs(alpha) < ABSURD):
        return
    scale = alpha / (math.sqrt(rank) if setup.rslora else rank)
    limit = STABILISED if setup.rslora else SCALES[1]
    if scale > limit or scale < SCALES[0]:
        divisor = f"the square root of rank {rank}" if setup.rslora else f"rank {rank}"
        yield Finding(
            field="lora_alpha",
            message=f"alpha {alpha:g} divided by {divisor} scales the adapter by {scale:.3g}; "
            + (f"without use_rslora it would be {alpha / rank:.3g}" if setup.rslora else KNOWN),
            help="write 16" if setup.rslora else f"start at twice the rank, {2 * rank}",
        )


@rule("ADP002", "new-tokens-not-trained", severity="warning")
def new_tokens_not_trained(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """Tokens are added to the vocabulary, but their embeddings are not trained.

    ## What it does
    With an adapter and added tokens, looks for the embedding in `modules_to_save` and `target_modules`, also for the
    output head if it is not tied to the embedding, and for PEFT's `trainable_token_indices`.

    ## Why it is bad
    The new rows keep their initial values. The model cannot distinguish the new tokens, and without the head it cannot
    learn to generate them.

    ## Example
    `tokens: [<tool_call>]` with LoRA on the attention only.

    ## Fix
    Add the embedding and the head to `modules_to_save`, or use `trainable_token_indices`, which trains only the new
    rows.

    ## Evidence
    axolotl rejects such a config ("`lora_modules_to_save` not properly set when adding new tokens"), and LLaMA-Factory
    adds the modules itself, with a warning. PEFT itself gives no warning.
    """
    if not setup.new_tokens or setup.adapter in (None, "full") or setup.trainable_tokens:
        return
    if setup.tool == "llamafactory" and setup.modules_to_save is None:
        return
    model = context.model
    trained_names = [
        name.rpartition(".")[2] for name in (*(setup.modules_to_save or ()), *(setup.target_modules or ()))
    ]
    missing = [] if _has_embedding(trained_names) else ["the embedding"]
    if model is not None and not model.tied_embeddings and not set(OUTPUT_HEADS) & set(trained_names):
        missing.append("the output head")
    if missing:
        yield Finding(
            field="new_tokens",
            message=f"tokens are added, but their rows in {' and '.join(missing)} are not trained",
            help=f"add {' and '.join(missing)} to {setup.name('modules_to_save')}, "
            "or set PEFT's trainable_token_indices",
        )


def _has_embedding(names: Sequence[str]) -> bool:
    return any(("embed" in name or name == "wte") and name not in OUTPUT_HEADS for name in names)


@rule("ADP003", "quantized-and-full", severity="error")
def quantised_and_full(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The config trains all weights, but they are stored in 4 or 8 bits.

    ## What it does
    With full training, looks at the quantization that the config sets and at the one in the model's own config.json.

    ## Why it is bad
    A step is far smaller than the distance between two of the 16 or 256 values that a weight can have, and the stored
    integers have no gradient. Libraries raise an error; code that bypasses it trains the norms and the embedding only.

    ## Example
    `load_in_4bit: true` without an adapter, or full training of a model whose name ends in `-bnb-4bit`.

    ## Fix
    Train an adapter on the quantized base, or load the base in 16 bits.

    ## Evidence
    transformers: "You cannot perform fine-tuning on purely quantized models"; reported in unslothai/unsloth#1110
    and bitsandbytes-foundation/bitsandbytes#737.
    """
    if setup.adapter != "full" or setup.unsloth:  # Unsloth drops the quantization itself
        return
    base_quantization = context.model.quantization if context.model else None
    # With other tools' fp8 it is unknown whether the weights are stored in FP8, or only multiplied in it.
    if setup.quantization in FROZEN_STORAGE or (setup.tool == "surefit" and setup.quantization == "fp8"):
        field, state = "quantization", f"are loaded as {setup.quantization}"
    elif base_quantization in STORED_QUANTIZED:
        field, state = "base_model", f"of {setup.base_model or 'this base'} are stored quantized ({base_quantization})"
    else:
        return
    yield Finding(
        field=field,
        message=f"all weights are to be trained, but they {state}: integers have no gradient",
        help="train an adapter, or load the base in 16 bits",
    )


@rule("ADP004", "whole-embeddings-trained", severity="info")
def whole_embeddings_trained(setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """The adapter contains full copies of the embedding or the head, but no token is added.

    ## What it does
    Counts the parameters that `modules_to_save` adds with the vocabulary's matrices.

    ## Why it is bad
    It is fine if the model hardly knows this kind of text, such as another language. Otherwise these copies make up
    most of the trained parameters, the optimizer state and the adapter file, without any benefit.

    ## Example
    `modules_to_save: [embed_tokens, lm_head]`, copied from a config that added tokens into one that adds none.

    ## Fix
    Remove them from `modules_to_save`, or keep them if the embeddings should be trained.

    ## Evidence
    ymcui/Chinese-LLaMA-Alpaca#456: an adapter many times the usual 17 MB, because a copied config saved the embedding
    and the head.
    """
    matrices = [name for name in setup.modules_to_save or () if _is_vocabulary_matrix(name)]
    if setup.adapter in (None, "full") or setup.new_tokens or not matrices:
        return
    parameters = len(matrices) * model.vocab_size * model.hidden_size
    yield Finding(
        field="modules_to_save",
        message=f"{' and '.join(matrices)} add {count_text(parameters)} trained parameters, but no token is added; "
        f"their AdamW moments alone need {bytes_text(MOMENTS * parameters)}",
        help="remove them, unless the embeddings should be trained",
    )


def _is_vocabulary_matrix(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in OUTPUT_HEADS or _has_embedding([last])


@rule("ADP005", "start-adapter-unfit", severity="error")
def start_adapter_unfit(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """The adapter to continue from does not exist, or does not match the config.

    ## What it does
    Reads the adapter_config.json in `lora.start_from` (of another tool's config, only if it is on this machine),
    and compares its rank, alpha, rsLoRA and DoRA with `lora.r`, `lora.lora_alpha`, `lora.use_rslora` and
    `lora.use_dora`, and whether it has factors for experts (`target_parameters`) with `lora.experts`. The adapter
    must have no rows of new tokens (`trainable_token_indices`), no trained biases or whole modules, and it must
    compute W + scaling · B A with the weights W in the base's files: `init_lora_weights` must not be PiSSA, OLoRA,
    CorDA, LoRA-GA or LoftQ, which change the base, and there must be no unknown setting. If the model is known, the
    layers that have factors, by the header of adapter_model.safetensors, are compared with the layers that
    `target_modules` matches; embeddings, a head that shares its weight with one, and layers that cannot get factors
    in SureFit must not be among them.

    ## Why it is bad
    With another rank the factors have the wrong shape; another alpha scales the trained factors differently from the
    first step on. Training stops at both, but only after the base model is loaded. PiSSA and similar methods move a
    part of the base's weights into the factors: added to the complete base, they give a different model.

    ## Example
    `start_from: runs/first/adapter`, trained with `lora_alpha: 64`, in a config with `lora_alpha: 32`: the trained
    update is halved.

    ## Fix
    Write the adapter's own rank and alpha, which the finding names.

    ## Evidence
    PEFT stores both in adapter_config.json and computes alpha / r when it loads:
    https://huggingface.co/docs/peft/package_reference/lora. The wrong rank shows as "size mismatch for …
    lora_A.default.weight" (huggingface/peft#554). huggingface/peft#2184: a PiSSA adapter on the complete base; measured
    on the built-in model, its loss was 5.16 instead of 4.74.
    """
    section = config.adapter
    if section is None or section.start_from is None:
        return
    directory = Path(section.start_from).expanduser()
    if context.is_foreign and not directory.exists():
        return  # another tool's file may be meant for another machine, or name a hub's adapter
    settings = adapter_config(directory)
    if isinstance(settings, str):
        yield Finding(
            field="lora.start_from",
            message=f"{section.start_from}: {settings}",
            help=STACKED if "," in section.start_from
            else "name the directory of a trained adapter, such as runs/NAME/adapter",
        )  # fmt: skip
        return
    for key in ("r", "lora_alpha"):
        stored_number = settings.get(key)
        config_number = getattr(section, key)
        if isinstance(stored_number, int | float) and stored_number != config_number:
            yield Finding(
                field=f"lora.{key}",
                message=f"{section.start_from} was trained with {key} {stored_number:g}, but lora.{key} is "
                f"{config_number:g}",
                help=f"write {key}: {stored_number:g}",
            )
    flags = {key: bool(settings.get(key)) for key in ("use_rslora", "use_dora")}
    for key, kind in {**flags, "experts": experts_of(settings.get("target_parameters"))}.items():
        adapter_value, config_value = (str(value).lower() for value in (kind, getattr(section, key)))
        if adapter_value != config_value:
            yield Finding(
                field=f"lora.{key}",
                message=f"{section.start_from} was trained with {key} {adapter_value}, but lora.{key} is "
                f"{config_value}",
                help=f"write {key}: {adapter_value}",
            )
    problem, blocking_setting = find_non_lora_setting(settings), find_setting_blocking_training(settings)
    if problem is not None:
        yield Finding(
            field="lora.start_from",
            message=f"training cannot continue from {section.start_from}: {problem.reason}",
            help=f"{problem.help}; or remove start_from",
        )
    elif blocking_setting is not None:
        yield Finding(
            field="lora.start_from",
            message=f"{section.start_from} has {blocking_setting}, which SureFit does not train",
            help=MERGE_IT,
        )
    if settings.get("trainable_token_indices"):
        yield Finding(
            field="lora.start_from",
            message=f"{section.start_from} has rows of new tokens, but training continues LoRA factors only",
            help="merge it, name the merged model, which has the tokens, and remove start_from and model.add_tokens",
        )
    yield from _other_layers(context.model, section, settings)


def _other_layers(model: ModelFacts | None, section: LoraSection, found: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the adapter has factors for other layers than the config targets, or for untrainable ones."""
    if model is None or not model.linear_modules:
        return
    target_layers = set(target_modules(model, section))
    tensors = _tensors_of(section)
    adapter_layers = modules_with_factors(tensors) & model.linear_modules.keys()
    if not found.get("target_parameters") and (untrainable := _never_adapted(model, tensors)):
        yield Finding(
            field="lora.start_from",
            message=f"{section.start_from} has factors for {untrainable[0]}, which SureFit does not train",
            help=MERGE_IT,
        )
        return
    if not adapter_layers or found.get("target_parameters"):
        names = found.get("target_modules")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            return  # a regular expression is compared when the model is loaded
        adapter_layers = set(target_modules(model, section.model_copy(update={"target_modules": names})))
    if differing := sorted(adapter_layers ^ target_layers):
        patterns = matching_exactly(adapter_layers, model.linear_modules) if adapter_layers else None
        help_text = f"write target_modules: [{', '.join(patterns)}]" if patterns else MERGE_IT
        yield Finding(
            field="lora.target_modules",
            message=f"{section.start_from} has factors for {len(adapter_layers)} layers, but target_modules matches "
            f"{len(target_layers)}; they differ in {differing[0]}",
            help=help_text if adapter_layers else "use an adapter of this model",
        )


def _tensors_of(section: LoraSection) -> Iterable[str]:
    """Return the tensor names in the adapter's weight file; empty if it cannot be read, which training reports."""
    try:
        return read_header(Path(section.start_from or "").expanduser() / "adapter_model.safetensors").keys()
    except (SureFitError, OSError):
        return ()


def _never_adapted(model: ModelFacts, tensors: Iterable[str]) -> list[str]:
    """Return the modules with factors that no `target_modules` can select in this model, sorted."""
    embeddings = {name.partition(".lora_")[0] for name in tensors if ".lora_embedding_" in name}
    return sorted(
        name
        for name in modules_with_factors(tensors)
        if PREFIX + name in embeddings
        or (model.tied_embeddings and name.rpartition(".")[2] in OUTPUT_HEADS)
        or (name in model.linear_modules and (closed_to_lora(model.model_type, name) or without_gradient(name)))
    )


@rule("ADP006", "dora-not-possible-there", severity="error", suppressible=False)
def dora_not_possible_there(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """DoRA is combined with a setting that does not support it.

    ## What it does
    With `lora.use_dora`, looks for frozen weights in float8, `speed.fused_lora: true`, `speed.compile`, and parallel
    modes other than ddp and fsdp.

    ## Why it is bad
    In every forward pass DoRA computes the norms of whole rows of W + B A. PEFT reads float8 weights without their
    scales, so the norms would be wrong; fused LoRA has no magnitudes; tensor parallelism splits rows. The other modes
    have not been shown to train the same as one process.

    ## Example
    `lora: {use_dora: true}` with `parallel: {mode: tp}`.

    ## Fix
    The finding says what to change. `lora.use_rslora` is possible everywhere.

    ## Evidence
    DoRA: Liu et al. 2024, https://arxiv.org/abs/2402.09353, equation 5. PEFT 0.21, `tuners/lora/dora.py`:
    `get_weight_norm` takes the norm of each row, of what `dequantize_module_weight` makes of bitsandbytes' and
    torchao's weights.
    """
    yield from find_refused_combinations(context, config, "ADP006")


@rule("ADP007", "experts-not-adapted", severity="warning")
def experts_not_adapted(context: LintContext, config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """LoRA with `all-linear` does not adapt the experts, which are not linear layers.

    ## What it does
    In SureFit's own config with `target_modules: all-linear` and without `experts`, adds up the routed experts' weights
    by the names and shapes in the headers of the weight files, and reports the share of the parameters without factors,
    and the number of factors with `lora.experts: true`.

    ## Why it is bad
    It is fine if only attention should be adapted. But `all-linear` sounds as if everything were adapted, while in a
    mixture of experts nine tenths of the weights may get no factors: there are fewer factors than in a dense model with
    the same config, and they learn less.

    ## Example
    `target_modules: all-linear` for Qwen3-30B-A3B: 95 % of its parameters are experts.

    ## Fix
    Name the layers to adapt, such as `target_modules: [q_proj, k_proj, v_proj, o_proj]`. To adapt the experts, set
    `lora.experts: true`, with a smaller rank if there are too many factors.

    ## Evidence
    transformers 5 stacks each layer's experts in one parameter (`mlp.experts.gate_up_proj`). PEFT reaches parameters
    with `target_parameters` only, and reads old configs' `gate_proj` and all-linear as such parameters in some model
    types and not in others (docs/models.md, which also says why `experts` is not a part of all-linear).
    """
    adapter = config.adapter
    if adapter is None or adapter.target_modules != "all-linear" or adapter.experts or context.is_foreign:
        return
    if not model.parameters or not model.expert_parameters:
        return
    layer_names = {name.rpartition(".")[2] for name in target_modules(model, adapter)}
    advice, alternative = f"name the adapted layers, [{', '.join(sorted(layer_names))}]", ""
    without_experts, with_experts = (
        count_trainable_parameters(model, section, "bfloat16")
        for section in (adapter, adapter.model_copy(update={"experts": True}))
    )
    if model.expert_stacks and without_experts and with_experts:
        alternative = (
            f", or set lora.experts: true for {count_text(with_experts.parameters)} trained parameters instead of "
            f"{count_text(without_experts.parameters)}"
        )
    yield Finding(
        field="lora.target_modules",
        message=f"all-linear does not adapt the experts of {model.name}: "
        f"{count_text(model.expert_parameters)} of {count_text(model.parameters)} parameters, "
        f"{model.expert_parameters / model.parameters:.0%}, get no factors",
        help=advice + (alternative or ", or train all weights"),
    )


@rule("ADP009", "experts-not-possible", severity="error", suppressible=False)
def experts_not_possible(context: LintContext, config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """`lora.experts` is set for a model without experts, or with a setting that PEFT cannot combine with it.

    ## What it does
    With `lora.experts`, looks for experts, and for routers where it is `with_router`, in the headers of the weight
    files; and for dropout, DoRA, quantized weights, `speed.compile` and every `parallel.mode` but single and ddp.

    ## Why it is bad
    In a model without experts the setting has no effect, and PEFT cannot adapt JetMoE's experts. Inkling files in which
    the rows of gate and up alternate allow training, but not merging. An expert's factors are added to its weights
    before the forward pass, so dropout and DoRA's norm have no input to work on. The other settings have not been shown
    to train the same as one process.

    ## Example
    `lora: {experts: true, lora_dropout: 0.05}`.

    ## Fix
    The finding says what to change.

    ## Evidence
    PEFT 0.21, `tuners/lora/layer.py`: `ParamWrapper` raises for `lora_dropout`, `use_dora` and `lora_bias`.
    """
    adapter = config.adapter
    yield from find_refused_combinations(context, config, "ADP009")
    if adapter is None or not adapter.experts or model.expert_parameters is None:
        return
    if not model.expert_stacks:
        yield Finding(
            field="lora.experts",
            message=f"{model.name} has no experts that can get factors",
            help="set lora.experts: false",
        )
    elif adapter.experts == "with_router" and not model.routers:
        yield Finding(
            field="lora.experts",
            message=f"{model.name} has no routers that can get factors",
            help="set lora.experts: true, which leaves routers as they are",
        )


@rule("ADP008", "closed-to-lora", severity="error", suppressible=False)
def names_closed_to_lora(context: LintContext, config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """A name in `target_modules` cannot get factors in this type of model.

    ## What it does
    In SureFit's own config, looks for the names that PEFT translates in some mixtures of experts (`gate_proj`,
    `up_proj`, `down_proj` and `gate`, or `w1`, `w2`, `w3` and `gate`); for `out_proj` in Mamba, Falcon H1 and
    Nemotron H; for the layers of Laguna and Inkling 2 whose factors PEFT drops while it reads an adapter; and for the
    layers of the block that several layers of a Zamba share.

    ## Why it is bad
    In a model with shared experts, or with layers without experts, linear layers have these names too. PEFT skips them
    and adapts the stacks of experts instead, with another rank. An adapter that was trained on the linear layers would
    be loaded into the wrong modules.

    ## Example
    `target_modules: [q_proj, v_proj, gate_proj, up_proj, down_proj]` for DeepSeek-V3.

    ## Fix
    Remove these names.

    ## Evidence
    `convert_peft_config_for_transformers` in PEFT 0.21. Before this rule, all-linear on Qwen3-MoE and Mixtral trained
    to the end and was then rejected as incomplete, and on DeepSeek-V3 it did not begin (docs/LOG.md, 23 November).
    """
    adapter = config.adapter
    if adapter is None or adapter.target_modules == "all-linear" or context.is_foreign:
        return
    for name in adapter.target_modules:
        if closed_to_lora(model.model_type, name):
            yield Finding(
                field="lora.target_modules",
                message=f"{name!r} of a {model.model_type} model cannot have its own factors",
                help=f"remove {name}",
            )


@rule("ADP010", "fused-in-files", severity="error", suppressible=False)
def fused_in_files(context: LintContext, config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """An adapter for this type of model could not be merged: its files store several layers' weights in one tensor.

    ## What it does
    In SureFit's own config, looks for LoRA on an HRM-Text model.

    ## Why it is bad
    Its files store query, key, value and gate as one matrix, and likewise the two halves of the MLP; transformers
    splits them on loading, and the factors belong to the parts. A merge writes the files' own tensors and would have to
    concatenate the parts again, which SureFit does not do.

    ## Example
    `train: {method: lora}` for an HRM-Text model.

    ## Fix
    Train all weights: `train.method: full`.

    ## Evidence
    `surefit merge` rejected such an adapter after training: "is in the base's files in another form than in the model"
    (docs/LOG.md, 23 November).
    """
    if config.train.method == "lora" and model.model_type in FUSED_IN_FILES and not context.is_foreign:
        yield Finding(
            field="train.method",
            message=f"the files of a {model.model_type} model store several layers' weights in one tensor: "
            "no adapter can be merged into them",
            help="train all weights: train.method: full",
        )


def adapter_config(directory: Path) -> dict[str, Any] | str:
    """Return the adapter_config.json in an adapter's directory, or a message if it cannot be used."""
    if not directory.is_dir():
        return "there is no such directory"
    try:
        settings = read_json_file(directory / "adapter_config.json")
    except FileNotFoundError:
        nested = adapters_below(directory)
        return f"it has no adapter_config.json{describe_nested_adapters(nested)}"
    except (OSError, ValueError):
        return "its adapter_config.json cannot be read"
    if not (directory / "adapter_model.safetensors").is_file():
        return "it has no adapter_model.safetensors"
    return settings if isinstance(settings, dict) else "its adapter_config.json is not a JSON object"
