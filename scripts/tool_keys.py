"""Write src/surefit/importers/schemas/keys.json: the keys that the other tools' config classes have.

pip download --no-deps -d WHEELS transformers==5.23.0 transformers==4.57.6 trl==1.16.0 peft==0.21.2 \
    accelerate==1.15.0 axolotl==0.19.0 llamafactory==0.9.5 deepspeed==0.19.0 \
    ms-swift==4.6.0
python scripts/tool_keys.py WHEELS

Only the sources are parsed; nothing is imported. A key that a tool accepts outside its classes is listed in `ALSO`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

OUTPUT = Path(__file__).parents[1] / "src/surefit/importers/schemas/keys.json"
CLASSES: Mapping[str, tuple[str, str, str]] = {
    "training_arguments": ("transformers-5.23.0", r"transformers/training_args\.py", "TrainingArguments"),
    "training_arguments_4": ("transformers-4.57.6", r"transformers/training_args\.py", "TrainingArguments"),
    "sft_config": ("trl-1.16.0", r"trl/trainer/(base|sft)_config\.py", "SFTConfig"),
    "trl": (
        "trl-1.16.0",
        r"trl/(trainer/(base|sft|model)_config|scripts/utils)\.py",
        "SFTConfig|ScriptArguments|DatasetMixtureConfig|ModelConfig",
    ),
    "trl_stages": (
        "trl-1.16.0",
        r"trl/(trainer/|experimental/\w+/)\w+_config\.py|trl/scripts/\w+\.py",
        r"(?!DatasetConfig|\w*Parser)\w+",
    ),
    "lora_config": ("peft-0.21.2", r"peft/(config|tuners/lora/config)\.py", "LoraConfig"),
    "llamafactory": ("llamafactory-0.9.5", r"llamafactory/hparams/\w+\.py", r"(?!EvaluationArguments)\w+"),
    "axolotl": ("axolotl-0.19.0", r"axolotl/utils/schemas/\w+\.py", "AxolotlInputConfig"),
    "axolotl_plugins": ("axolotl-0.19.0", r"axolotl/integrations/\w+/args\.py", r"\w+Args|SwanLabConfig"),
    "accelerate": (
        "accelerate-1.15.0",
        r"accelerate/commands/config/config_args\.py",
        "ClusterConfig|SageMakerConfig",
    ),
    "swift": (
        "ms_swift-4.6.0",
        r"swift/(arguments|trainers|rlhf_trainers|ray_utils)/(\w+/)?\w*arg\w*\.py",
        "RLHFArguments|PretrainArguments",
    ),
    "zero": ("deepspeed-0.19.0", r"[^/]+/deepspeed/runtime/zero/config\.py", "DeepSpeedZeroConfig"),
}
"""Name of a set of keys → (release, files, classes): it holds the fields of the classes and of their bases."""
BEYOND = {
    "training_arguments_4": ("training_arguments",),
    "sft_config": ("training_arguments",),
    "trl_stages": ("training_arguments", "trl"),
    "llamafactory": ("training_arguments",),
    "swift": ("training_arguments",),
}
"""Name of a set → sets whose keys it leaves out."""
LEFT_OUT = {
    "training_arguments_4": "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap include_tokens_per_second "
    "overwrite_output_dir per_gpu_eval_batch_size per_gpu_train_batch_size",
    "trl_stages": "alpha callbacks model",
    "axolotl": "dpo_beta dpo_generate_during_eval dpo_norm_loss dpo_use_logits_to_keep eval_max_new_tokens "
    "eval_table_size evaluation_strategy flash_attn_rms_norm max_packed_sequence_len noisy_embedding_alpha "
    "rope_scaling rpo_alpha s2_attention",
    "axolotl_plugins": "recipe save_compressed",
}
"""Fields that raise or warn (schemas/renamed.json has them), that only a server has, or that are nested."""
ALSO = {
    "training_arguments_4": "use_ipex",
    "trl": "env",  # TrlParser
    "llamafactory": "generation_config generation_max_length generation_num_beams predict_with_generate "
    "sortish_sampler kt_config kt_cpu_activation",  # Seq2SeqTrainingArguments, and KTransformers' release
    "swift": "ENV generation_config generation_max_length generation_num_beams predict_with_generate sortish_sampler",
    "accelerate": "dynamo_backend fp16",  # older keys that it converts
    "zero": "partition_stream_chunk_size stage3_partition_stream_chunk_size",
    "trl_launcher": """
        accelerate_config config_file cpu debug_launcher deepspeed_config_file dynamo_backend fsdp_config_file
        gpu_ids machine_rank main_process_ip main_process_port mixed_precision multi_gpu
        num_cpu_threads_per_process num_machines num_processes rdzv_backend same_network use_deepspeed
        use_fsdp zero_stage
    """,  # passed to `accelerate launch` (TRL 1.16.0, cli/accelerate_config.py)
    "open_r1": """
        benchmarks callbacks chat_template hub_model_revision num_completions_to_print overwrite_hub_revision
        push_to_hub_revision system_prompt wandb_entity wandb_project wandb_run_group
    """,  # open-r1's additions to TRL's configs; its files look like TRL's (src/open_r1/configs.py)
    "deepspeed": """
        activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_config comms_logger
        communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency
        data_parallel_size data_types dataloader_drop_last datastates_ckpt disable_allgather dump_state
        eigenvalue elasticity expert_parallel flops_profiler fp16 gradient_accumulation_steps
        gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine
        log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
        progressive_layer_drop scheduler seq_parallel_comm_data_type seq_parallel_communication_data_type
        sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard
        timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
        use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """,  # read by name (DeepSpeed 0.19, runtime/config.py)
}
"""Keys that a tool accepts outside these classes."""


def read_sources(release: str, files: str, wheels: Path) -> Iterator[str]:
    """Yield the sources of a release's files, from a wheel or a source archive."""
    path = next(path for path in sorted(wheels.iterdir()) if path.name.startswith(release))
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from (wheel.read(name).decode() for name in wheel.namelist() if re.fullmatch(files, name))
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if re.fullmatch(files, member.name) and (file := archive.extractfile(member)):
                yield file.read().decode()


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields that a class declares and its constructor accepts, also under their aliases."""
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        text = ast.unparse(item)
        if not item.target.id.startswith("_") and "ClassVar" not in text and "init=False" not in text:
            yield item.target.id
            yield from re.findall(r"\balias='(\w+)'", text)


def keys_of(name: str, wheels: Path) -> set[str]:
    """Return the keys of one set of classes."""
    release, files, wanted = CLASSES[name]
    nodes = [
        node
        for source in read_sources(release, files, wheels)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    ]
    pending = [node for node in nodes if re.fullmatch(wanted, node.name)]
    keys: set[str] = set()
    seen: set[str] = set()
    while pending:
        node = pending.pop()
        keys |= set(fields_of(node))
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases} - seen
        seen |= bases
        pending += [other for other in nodes if other.name in bases]
    return keys


def main(wheels: Path) -> None:
    """Read every class and write the file."""
    fields = {name: keys_of(name, wheels) for name in CLASSES}
    table = {}
    for name in (*CLASSES, *sorted(ALSO.keys() - CLASSES.keys())):
        without = set(LEFT_OUT.get(name, "").split()).union(*(fields[other] for other in BEYOND.get(name, ())))
        table[name] = {
            "release": CLASSES[name][0] if name in CLASSES else "",
            "keys": " ".join(sorted(fields.get(name, set()) - without | set(ALSO.get(name, "").split()))),
        }
    OUTPUT.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
