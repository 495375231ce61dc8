"""PAR: many processes, many GPUs, many machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from surefit.config.modes import MODES
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_data_ranks
from surefit.facts.model import ModelFacts
from surefit.facts.module_names import LAYER_CLASSES, layers_of
from surefit.facts.setup import Setup
from surefit.facts.sharding import sharing_obstacle
from surefit.lint.rule import Finding, LintContext, find_refused_combinations, rule

SPREADING = {"auto", "balanced", "balanced_low_0", "sequential"}
"""Values of device_map that spread one model over several GPUs."""
MANY_PROCESSES = {*MODES, "zero1"} - {"single"}
INTEGERS = {"uint8", "int8", "int16", "int32", "int64"}


@rule("PAR001", "four-bit-under-fsdp-without-storage-type", severity="error")
def four_bit_under_fsdp(setup: Setup) -> Iterator[Finding]:
    """The 4-bit weights are stored in a dtype that FSDP and ZeRO-3 cannot shard.

    ## What it does
    Compares `bnb_4bit_quant_storage` with the dtype of the other weights if a 4-bit model is sharded by FSDP or ZeRO-3.
    Skipped for tools that choose the storage dtype themselves, and for configs that do not set it.

    ## Why it is bad
    bitsandbytes packs 4-bit weights into bytes (uint8). FSDP flattens the weights of a layer into one tensor and needs
    the same floating-point dtype for all of them: it stops with "Cannot flatten integer dtype tensors" or "Must flatten
    tensors with uniform dtype". FSDP2 skips such weights with a warning: every GPU then holds the whole model.

    ## Example
    `load_in_4bit: true`, `bnb_4bit_quant_storage: uint8`, `torch_dtype: bfloat16` under FSDP.

    ## Fix
    Use the dtype of the other weights: `bnb_4bit_quant_storage: bfloat16`.

    ## Evidence
    https://huggingface.co/docs/peft/accelerate/fsdp; huggingface/peft#1432, axolotl-ai-cloud/axolotl#1494;
    MakazhanAlpamys/Soup#350 measured both messages and the fix on eight H100.
    """
    storage, dtype = setup.quant_storage, setup.weights_dtype or setup.dtype
    mode = MODES.get(setup.parallel or "")
    if setup.tool == "surefit" or mode is None or not (mode.sharded and mode.divided == "weights"):
        return  # PAR009 covers SureFit's own engines
    if setup.quantization not in ("nf4", "fp4") or not storage:
        return
    if storage in INTEGERS or (dtype and storage != dtype):
        detail = f"the others as {dtype}" if dtype else "which is not a floating-point dtype"
        engine = "ZeRO-3" if mode.deepspeed else "FSDP"
        yield Finding(
            field="quant_storage",
            message=f"the 4-bit weights are stored as {storage}, {detail}: {engine} cannot shard them",
            help=f"write {setup.name('quant_storage')}: {dtype or 'bfloat16'}",
        )


@rule("PAR002", "device-map-with-processes", severity="error")
def device_map_with_processes(setup: Setup) -> Iterator[Finding]:
    """The device map spreads the model over all GPUs, but several processes train it.

    ## What it does
    Looks for `device_map` auto, balanced or sequential with more than one process, and for any `device_map` with
    ZeRO-3.

    ## Why it is bad
    Each process would spread its own copy over all GPUs. accelerate stops with "You can't train a model that has been
    loaded with `device_map='auto'` in any distributed mode", transformers with "DeepSpeed Zero-3 is not compatible with
    passing a `device_map`".

    ## Example
    A 4-bit model with `device_map="auto"` under `accelerate launch --num_processes 2`.

    ## Fix
    Remove `device_map` if each process drives one GPU; keep it if one process drives them all.

    ## Evidence
    A published report on LLM ranking on two T4s took this for a limit of 4-bit models ("4-bit + DDP does not work").
    huggingface/transformers#31557; huggingface/peft#306 for ZeRO-3.
    """
    spreads = setup.device_map in SPREADING
    several_processes = (
        (setup.processes or 0) > 1 or (setup.processes_per_machine or 0) > 1 or (setup.world_size or 0) > 1
    )
    mode = MODES.get(setup.parallel or "")
    is_zero3 = mode is not None and mode.deepspeed and mode.divided == "weights"
    if is_zero3 and setup.device_map and setup.device_map != "none":
        reason = "ZeRO-3 shards the weights itself"
    elif spreads and (several_processes or setup.parallel in MANY_PROCESSES):
        count = setup.processes or setup.world_size or setup.processes_per_machine
        place = setup.places.get("processes")
        in_other_file = place is not None and place.path != getattr(setup.places.get("device_map"), "path", None)
        source = f" ({Path(place.path).name}:{place.line})" if place and place.path and in_other_file else ""
        reason = f"each of {count} processes{source}" if count and count > 1 else f"each process of {setup.parallel}"
        reason += " would spread its own copy over all GPUs"
    else:
        return
    yield Finding(
        field="device_map",
        message=f"{setup.name('device_map')} is {setup.device_map}: {reason}",
        help=f"remove {setup.name('device_map')}, or start one process",
    )


@rule("PAR003", "no-process-on-a-machine", severity="error")
def no_process_on_a_machine(setup: Setup) -> Iterator[Finding]:
    """There are fewer processes than machines.

    ## What it does
    Compares the number of all processes with the number of machines.

    ## Why it is bad
    In accelerate, `num_processes` is the total over *all* machines, and each starts `num_processes // num_machines`: 1
    // 2 is 0. The launcher fails, or waits for a process that never starts.

    ## Example
    `num_processes: 1`, `num_machines: 2`, meant as one per machine.

    ## Fix
    Write the total number of processes: machines × GPUs per machine.

    ## Evidence
    A published function-calling project ran two nodes with `num_processes: 1`. huggingface/accelerate#2818: `accelerate
    config` itself writes such a file; huggingface/accelerate#2521: a maintainer confirms that it is the total.
    """
    processes, machines = setup.processes, setup.machines
    if processes and machines and processes < machines:
        gpus = setup.gpus or 1
        yield Finding(
            field="processes",
            message=f"{_are(processes)} for {machines} machines: {setup.name('processes')} is the total, so a "
            "machine gets none",
            help=f"write {machines * gpus} ({machines} machines × {gpus} per machine)",
        )


def _are(count: int) -> str:
    return "1 process" if count == 1 else f"{count:,} processes"


@rule("PAR004", "processes-not-divisible-by-machines", severity="error")
def processes_not_divisible_by_machines(setup: Setup) -> Iterator[Finding]:
    """The processes cannot be divided evenly among the machines.

    ## What it does
    Divides the total number of processes by the number of machines.

    ## Why it is bad
    Every machine gets the same number, rounded down: GPUs stay idle and the global batch is smaller than intended, or
    the processes wait for others that never start.

    ## Example
    `num_processes: 10` on a machine with 8 GPUs and one with 2: 5 start on each.

    ## Fix
    Write a multiple of the number of machines.

    ## Evidence
    huggingface/accelerate#3894 (5 and 5 instead of 8 and 2) and huggingface/accelerate#1291 (8 on 3 machines: the run
    hangs).
    """
    processes, machines = setup.processes, setup.machines
    if processes and machines and processes > machines and processes % machines:
        per_machine = processes // machines
        yield Finding(
            field="processes",
            message=f"{processes:,} processes on {machines} machines: {per_machine} start on each, "
            f"{per_machine * machines} in all",
            help=f"write {per_machine * machines} or {(per_machine + 1) * machines}",
        )


@rule("PAR005", "fsdp-on-cpu-is-ddp", severity="error")
def fsdp_on_cpu_is_ddp(setup: Setup) -> Iterator[Finding]:
    """FSDP is configured on a CPU, where accelerate silently uses DDP.

    ## What it does
    Looks for FSDP in a config that also sets the run to the CPU.

    ## Why it is bad
    Nothing is sharded: every process holds the whole model and optimizer. The losses are the same, so it goes
    unnoticed, and such a run does not test FSDP.

    ## Example
    `distributed_type: FSDP` with `use_cpu: true`.

    ## Fix
    Use GPUs, or configure DDP, which is what runs. On a CPU, torch's own `fully_shard` does shard.

    ## Evidence
    Measured with accelerate 1.15: the model is wrapped in DistributedDataParallel.
    """
    if setup.parallel == "fsdp" and setup.on_cpu and setup.tool != "surefit":
        yield Finding(
            field="parallel",
            message="FSDP on the CPU: accelerate silently uses DDP, and nothing is sharded",
            help="use GPUs, or configure DDP",
        )


@rule("PAR006", "more-processes-than-gpus", severity="error")
def more_processes_than_gpus(setup: Setup) -> Iterator[Finding]:
    """More processes start on a machine than it has GPUs.

    ## What it does
    Compares the processes per machine with the GPUs per machine, if both are set.

    ## Why it is bad
    The process beyond the last GPU stops the run with "CUDA error: invalid device ordinal", or two processes share a
    GPU and its memory.

    ## Example
    `--nproc_per_node 8` in a job with `#SBATCH --gres=gpu:4`.

    ## Fix
    Start one process per GPU.

    ## Evidence
    A published function-calling project had to fix how its job counted GPUs: `nvidia-smi -L` lists names, and
    `nvidia-smi -L | wc -l` counts them. https://docs.pytorch.org/docs/stable/elastic/run.html: one process per GPU.
    """
    per_machine, gpus = _per_machine(setup), setup.gpus
    if per_machine and gpus and per_machine > gpus and not setup.on_cpu:
        yield Finding(
            field="processes_per_machine" if setup.processes_per_machine else "processes",
            message=f"{per_machine:,} processes start on a machine with {gpus} GPU{'s' * (gpus != 1)}",
            help=f"start {gpus} per machine",
        )


def _per_machine(setup: Setup) -> int | None:
    if setup.processes_per_machine or not setup.processes or not setup.machines:
        return setup.processes_per_machine
    return setup.processes // setup.machines


@rule("PAR007", "weights-loaded-once-and-not-sent", severity="error")
def weights_loaded_once_and_not_sent(setup: Setup) -> Iterator[Finding]:
    """Only one process loads the weights, and they are not broadcast to the others.

    ## What it does
    Looks, with FSDP version 1, for `fsdp_cpu_ram_efficient_loading` with `fsdp_sync_module_states` switched off.

    ## Why it is bad
    All processes but the first hold random weights. `accelerate launch` raises an error; a script that builds the
    plugin itself trains the random weights.

    ## Example
    `fsdp_cpu_ram_efficient_loading: true`, `fsdp_sync_module_states: false`.

    ## Fix
    Switch on `fsdp_sync_module_states`.

    ## Evidence
    huggingface/accelerate#2037 and its documentation ("all the processes expect the main process would have random
    empty weights"); `prepare_multi_gpu_env` of accelerate 1.15 raises a `ValueError`.
    """
    if setup.fsdp_efficient_loading and setup.fsdp_sync_states is False and setup.fsdp_version != 2:
        yield Finding(
            field="fsdp_sync_states",
            message=f"{setup.name('fsdp_efficient_loading')} loads the weights in one process, but "
            f"{setup.name('fsdp_sync_states')} is off: the others keep random weights",
            help=f"switch on {setup.name('fsdp_sync_states')}",
        )


@rule("PAR008", "unused-parameters-with-checkpointing", severity="error")
def unused_parameters_with_checkpointing(setup: Setup) -> Iterator[Finding]:
    """DDP's search for unused parameters does not work with reentrant gradient checkpointing.

    ## What it does
    Looks for `ddp_find_unused_parameters` together with gradient checkpointing in its old, reentrant form.

    ## Why it is bad
    The backward pass reruns the forward pass, which DDP has already inspected: the first step stops with "Expected to
    mark a variable ready only once".

    ## Example
    `ddp_find_unused_parameters: true`, `gradient_checkpointing: true`, `use_reentrant: true`.

    ## Fix
    Switch off `ddp_find_unused_parameters` (with LoRA all trained parameters are used), or write
    `use_reentrant: false`.

    ## Evidence
    Measured with torch 2.13: both together stop at the first backward pass, either alone trains. pytorch/pytorch#24005,
    huggingface/accelerate#2017.
    """
    if setup.find_unused_parameters and setup.gradient_checkpointing and setup.reentrant:
        yield Finding(
            field="find_unused_parameters",
            message=f"{setup.name('find_unused_parameters')} and reentrant gradient checkpointing stop the first step: "
            '"Expected to mark a variable ready only once"',
            help=f"switch {setup.name('find_unused_parameters')} off, or write use_reentrant: false",
        )


@rule("PAR009", "quantized-weights-in-shards", severity="error", suppressible=False)
def quantised_weights_in_shards(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """Quantized weights cannot be sharded, because their scales are stored separately.

    ## What it does
    Looks, in SureFit's own config, for `parallel.mode` fsdp, zero3 or tp together with `model.quantization` nf4 or fp8.

    ## Why it is bad
    The layers read their scales from the weight itself, which is a new object each time it is gathered: bitsandbytes
    then builds a new parameter inside the forward pass, which FSDP does not track. zero3 gathers the weights without
    their scales, and tensor parallelism splits the blocks that share a scale.

    ## Example
    `model.quantization: nf4`, `parallel.mode: fsdp`.

    ## Fix
    Set `parallel.mode: ddp`, because a quantized model fits on most devices, or `model.quantization: none`.

    ## Evidence
    bitsandbytes 0.50, `nn/modules.py`: `fix_4bit_weight_quant_state_from_module` replaces `module.weight` by a new
    `Params4bit` if it finds a plain parameter.
    """
    yield from find_refused_combinations(context, config, "PAR009")


@rule("PAR010", "processes-without-micro-batches", severity="warning")
def processes_without_micro_batches(config: SureFitConfig) -> Iterator[Finding]:
    """The micro batches of a step cannot be divided evenly among the processes.

    ## What it does
    If rows are not packed, divides `train.global_batch_size` by the micro batch times the number of data-parallel
    processes.

    ## Why it is bad
    The result is the same, but a process without rows computes an empty micro batch while it waits for the others: its
    device is idle.

    ## Example
    `global_batch_size: 12`, `per_device_train_batch_size: 4`, two devices: two micro batches on one, one on the other.

    ## Fix
    Use a smaller micro batch, or a global batch that is a multiple of micro batch times processes.

    ## Evidence
    Arithmetic: 3 micro batches on 2 processes take as long as 4.
    """
    micro, ranks, global_batch = (
        config.train.per_device_train_batch_size,
        count_data_ranks(config),
        config.train.global_batch_size,
    )
    if (
        ranks == 1
        or not isinstance(micro, int)
        or global_batch == "auto"
        or config.data.packing is not False
        or global_batch % micro
    ):
        return
    batches = global_batch // micro
    if batches % ranks:
        yield Finding(
            field="train.per_device_train_batch_size",
            message=f"{batches} micro batches for {ranks} processes: in every step {ranks - batches % ranks} of them "
            "wait for the others",
            help=f"set train.global_batch_size: {-(-batches // ranks) * ranks * micro}, or a smaller micro batch",
        )


@rule("PAR011", "scores-in-training-of-a-shared-model", severity="error", suppressible=False)
def scores_in_training_of_a_shared_model(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """`evaluate.in_training` generates in one process, which cannot run the model alone in this mode.

    ## What it does
    Looks, in SureFit's own config, for `evaluate.in_training` with any `parallel.mode` but ddp.

    ## Why it is bad
    Only the first process generates, while the others wait. With fsdp, zero3, tp and pp it holds only a part of the
    model and would wait for the others forever. With cp it holds all weights, but every attention waits for the other
    processes' tokens. With zero2 it could generate, but that is not implemented.

    ## Example
    `evaluate.in_training: true`, `parallel.mode: fsdp`.

    ## Fix
    Set it to false, and run `surefit evaluate` afterwards; the held-out loss is measured in every mode.

    ## Evidence
    By design, `fully_shard` gathers a layer with a collective that all processes must call.
    """
    yield from find_refused_combinations(context, config, "PAR011")


@rule("PAR012", "mode-excludes-setting", severity="error", suppressible=False)
def mode_excludes_setting(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """The parallel mode cannot be combined with another setting.

    ## What it does
    Looks up the resolved `parallel.mode` and `parallel.cp` in the table of conflicts with the optimizer, fused LoRA,
    compiled layers, NEFTune and flash attention.

    ## Why it is bad
    The engine would stop after the model is loaded, or its results would differ from one process.

    ## Example
    `speed.compile: true` with `parallel.mode: zero3`.

    ## Fix
    The finding says what to change.

    ## Evidence
    `config/capabilities.py` has a reason for each row; `tests/combinations` trains two steps of all allowed pairs. That
    test found that 8-bit optimizers with fsdp and zero2, compiled layers with pp, and fused LoRA with zero3 were
    rejected only by the engines, after loading.
    """
    yield from find_refused_combinations(context, config, "PAR012")


@rule("PAR013", "model-not-shareable", severity="error", suppressible=False)
def model_not_shareable(context: LintContext, config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """This model cannot be divided among this number of processes in this parallel mode.

    ## What it does
    Divides the attention heads and the key-value heads by `parallel.tp`, and compares the layers with `parallel.pp`.
    With `parallel.cp`, checks that only attention mixes tokens. If layers or tokens are split, checks that
    `config.json` does not enable the router loss of a mixture of experts (`output_router_logits: true`).

    ## Why it is bad
    A head cannot be split, and a stage needs a layer: training would stop after the model is loaded. A recurrent layer
    would not see the tokens of the other processes. The router loss needs all layers and tokens of a micro batch, which
    no process has.

    ## Example
    `parallel: {mode: tp, tp: 4}` with a model of 14 attention heads and 2 key-value heads.

    ## Fix
    Use another number of processes, or another `parallel.mode`.

    ## Evidence
    Qwen2.5-0.5B has 14 heads and 2 key-value heads: `parallel/tensor_parallel.py` rejected tp: 4 once the model was
    loaded.
    """
    resolved_config = context.resolved.config if context.resolved else config
    obstacle = sharing_obstacle(resolved_config, model)
    if obstacle:
        field, reason = obstacle
        size = getattr(resolved_config.parallel, field.rpartition(".")[2])
        yield Finding(
            field=field,
            message=f"{model.name} cannot be trained with {field}: {size}: {reason}",
            help="choose a number that divides evenly, or another parallel.mode",
        )


@rule("PAR024", "layer-class-of-another-model", severity="error")
def layer_class_of_another_model(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """FSDP is set to wrap a layer class that this model does not have.

    ## What it does
    Compares `fsdp_transformer_layer_cls_to_wrap` with the decoder layer class of the model's type, which it reads from
    config.json or infers from the name. For an Accelerate config, the model is the one in the script that a launch line
    beside it starts. Names that are not decoder layers of a known model are ignored.

    ## Why it is bad
    The run stops with "Could not find the transformer layer class … in the model", after the weights are loaded.

    ## Example
    `fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer` for `mistralai/Mistral-7B-v0.3`.

    ## Fix
    Write the class that the finding names, or remove the key: transformers knows the layer classes of its models.

    ## Evidence
    Accelerate 1.15, utils/dataclasses.py, `set_auto_wrap_policy`.
    """
    layers = layers_of(setup.base_model, context.model.model_type if context.model else None)
    for name in setup.fsdp_layers or () if layers else ():
        if layers and name in LAYER_CLASSES and name != layers.layer_class:
            yield Finding(
                field="fsdp_layers",
                message=f"{setup.base_model} has no layer class {name}; its class is {layers.layer_class}",
                help=f"write {layers.layer_class}, or remove the key",
            )
