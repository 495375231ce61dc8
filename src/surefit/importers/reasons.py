"""Reasons for which a key of another tool's config cannot be expressed in SureFit's."""

from __future__ import annotations

from surefit.config.trackers import TRACKERS

REASONS: tuple[tuple[str, str], ...] = (
    (
        "it describes a SageMaker job, which SureFit does not start",
        "=iam_role_name =ec2_instance_type =profile =region =py_version =pytorch_version =transformers_version "
        "=base_job_name =additional_args =image_uri =sagemaker_inputs_file =sagemaker_metrics_file",
    ),
    (
        "SureFit writes metrics.jsonl and report.html, and reports to the trackers in its section telemetry",
        " ".join((*TRACKERS, "comet trackio swanlab otel report_to project run_name")),
    ),
    (
        "SureFit trains on all rows of a set, or on data.limit of them, sampled evenly",
        "max_samples shard_num shard_idx =shards interleave dataset_exact_dedup",
    ),
    ("SureFit publishes nothing", "hub push export_"),
    (
        "SureFit logs every step",
        "logging log_level log_on log_nan log_history disable_tqdm plot_loss profil include_tok include_num "
        "include_tkps include_eff debug wall_clock steps_per_print dump_state timers memory_breakdown flops",
    ),
    ("secrets belong in the environment", "api_key auth_token hf_token secret password"),
    (
        "SureFit quantizes a frozen base to nf4, with nested scales, or to fp8 (model.quantization)",
        "quantiz load_in_ bnb_ gptq fp8 nf4 nvfp4 torchao qat loftq double_quant",
    ),
    ("SureFit computes in model.dtype", "bf16 fp16 tf32 float16 float32 dtype precision autocast data_types"),
    (
        "the section parallel sets how devices share a run; it also reads a file of Accelerate or DeepSpeed",
        "deepspeed deepcompile zero fsdp ddp parallel shard world_size num_process machine gpu_ids main_process "
        "main_training rdzv same_network offload device ray_ tpu mpi cpu_affinity distributed compute_env "
        "communication allgather allreduce reduce_ dynamo megatron downcast broadcast gradient_predivide prescale dp_ "
        "elasticity pipeline nebula comms aio hybrid_engine sagemaker",
    ),
    (
        "SureFit has its own attention and kernels: see the section speed",
        "attention attn kernel liger unsloth cross_entropy torch_compile use_cache kv_cache tiled flash sdpa",
    ),
    (
        "SureFit packs whole examples of one step; it counts and leaves out examples longer than data.max_length",
        "pack pose_ use_pose pad_to_ padding_free batch_flattening group_by_length sampling_strategy length_column "
        "truncation excess_length max_samples min_sample",
    ),
    (
        "SureFit trains on given answers and pairs of them, not on rewards",
        "grpo ppo reward vllm =trl ebft sglang kto_ desirable",
    ),
    (
        "SureFit's section objective has no such setting",
        "=rl rl_ rlhf_ dpo orpo simpo pref_ ref_ cpo_ ld_alpha =beta =label_smoothing precompute_ref discopop "
        "divergence loss_weights use_weighting",
    ),
    (
        "SureFit trains with AdamW on the mean loss of the answers",
        "adam optim muon galore apollo badam lion dion loraplus lr_groups embedding_lr lisa relora jagged grokfast "
        "label_smoothing dft asft eaft spectrum loss_type router_aux moe_aux curriculum",
    ),
    ("SureFit's train.lr_scheduler_type has no such option", "scheduler cosine lr_"),
    (
        "SureFit's LoRA has rank, alpha, dropout, target modules, experts, rsLoRA and DoRA only",
        "lora peft_ pissa dora target_param modules_to_save additional_target layers_ _pattern freeze unfrozen adapter "
        "bias trainable_token oft_ arrow eva_ corda velora qalora kasa",
    ),
    (
        "SureFit decides how checkpoints are written, and `--resume` continues a run",
        "checkpoint save resum load_best best_model greater_is early_stop",
    ),
    (
        "SureFit scores after training, greedily, with `surefit evaluate`",
        "eval predict metric generation generate temperature top_k top_p num_beams max_new_tokens do_sample bench "
        "length_penalty repetition",
    ),
    ("SureFit trains on answers only, and on all of a plain text", "train_on_"),
    (
        "SureFit uses the model's own tokenizer and chat template",
        "template token eos_ bos_ system thinking tool_format eot_ role field_ message_ processor vocab",
    ),
    (
        "SureFit reads and shuffles the rows itself",
        "dataset dataloader data_seed stream shuffle preprocess buffer mix_ interleave media image video audio columns "
        "sortish drop_last",
    ),
    ("SureFit manages memory itself", "torch gc_ memory empty_cache cache accelerator_config find_batch kt_"),
    (
        "it does not affect training",
        "=do_train =do_eval =do_predict local_rank overwrite task_type peft_version auto_mapping inference_mode is_ "
        "strict plugins skip_memory",
    ),
)
"""(reason, parts of the keys it applies to; with = a whole key): the first match counts."""


def unmapped_reason(key: str) -> str:
    """Return the reason for which SureFit's config cannot express a key.

    >>> unmapped_reason("wandb_entity")
    'SureFit writes metrics.jsonl and report.html, and reports to the trackers in its section telemetry'
    >>> unmapped_reason("packing_strategy")
    'SureFit packs whole examples of one step; it counts and leaves out examples longer than data.max_length'
    """
    for reason, parts in REASONS:
        if any(part[1:] == key if part.startswith("=") else part in key for part in parts.split()):
            return reason
    return "SureFit has no such setting"
