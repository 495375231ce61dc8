"""The keys that the other tools accept, written down from the releases named below.

A key that is neither here nor in a tool's table nor in its `gone` keys is unknown to the tool.
"""

from __future__ import annotations


def key_set(text: str) -> frozenset[str]:
    """Return the whitespace-separated words of a text as a set."""
    return frozenset(text.split())


TRAINING_ARGUMENTS = key_set("""
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2
    adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval
    data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug
    deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval
    fsdp fsdp_config full_determinism gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
    hub_strategy hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
    label_smoothing_factor learning_rate length_column_name liger_kernel_config load_best_model_at_end
    local_rank log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
    metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
    parallelism_config per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project
    push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint
    run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed
    skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu
    use_liger_kernel warmup_steps weight_decay
""")
"""transformers 5.23.0, TrainingArguments."""

TRAINING_ARGUMENTS_4 = key_set("""
    adafactor fp16_backend fp16_opt_level group_by_length half_precision_backend include_inputs_for_metrics
    jit_mode_eval logging_dir mp_parameters no_cuda past_index push_to_hub_model_id push_to_hub_organization
    push_to_hub_token ray_scope save_safetensors torchdynamo tpu_metrics_debug tpu_num_cores use_ipex
    use_legacy_prediction_loop use_mps_device warmup_ratio
""")
"""Keys that transformers 4.57 accepted and 5 does not."""

TRL = key_set("""
    activation_offloading assistant_only_loss attn_implementation bf16 bnb_4bit_quant_storage
    bnb_4bit_quant_type chat_template_path completion_only_loss dataset_config dataset_kwargs dataset_name
    dataset_num_proc dataset_streaming dataset_test_split dataset_text_field dataset_train_split datasets dtype
    env eos_token eval_packing gradient_checkpointing ignore_bias_buffers learning_rate load_in_4bit
    load_in_8bit logging_steps lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
    lora_target_parameters lora_task_type loss_type lr_scheduler_kwargs max_length model_init_kwargs
    model_name_or_path model_revision packing packing_strategy pad_to_multiple_of pad_token padding_free
    router_aux_loss_coef shuffle_dataset streaming test_split_size torch_empty_cache_steps truncation_mode
    trust_remote_code use_bnb_nested_quant use_dora use_liger_kernel use_peft use_rslora
""")
"""TRL 1.16.0: SFTConfig, ModelConfig, ScriptArguments and DatasetMixtureConfig; `env` comes from its command line."""

TRL_STAGES = key_set("""
    add_tail_bucket beta beta1 beta2 cache_implementation cast_lm_head_to_fp32 center_rewards_coefficient
    chat_template_kwargs cpo_alpha data_parallel_size delta desirable_weight diagnostics_flat_tolerance
    diagnostics_warning_interval disable_dropout discopop_tau distillation_add_tail distillation_alpha
    distillation_is_clip distillation_mode distillation_objective distillation_topk distillation_weight
    distributed_executor_backend dont_reprompt_on_self_success ds3_gather_for_generation
    enable_prefix_caching enforce_eager entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min
    entropy_target environment_feedback_only_without_solution epsilon epsilon_high f_alpha_divergence_coef
    f_divergence_type feedback_template filter_all_incorrect fork_threshold_tokens generate_during_eval
    generate_from_teacher generation_batch_size generation_kwargs gpu_memory_utilization
    heartbeat_stale_after_s host importance_sampling_level include_environment_feedback is_encoder_decoder
    iw_opd_epsilon iw_opd_gamma kv_cache_dtype label_smoothing ld_alpha lmbda log_completions
    log_completions_hub_repo log_completions_steps log_multimodal log_unique_prompts loss_add_tail
    loss_top_k loss_weights mask_truncated_completions max_completion_length max_inflight_tasks
    max_model_len max_new_tokens max_prompt_length max_reprompt_len max_staleness
    max_tool_calling_iterations min_p missing_eos_penalty multi_objective_aggregation normalize_advantages
    num_completions_to_print num_generations num_generations_eval num_iterations num_loss_tokens_to_skip
    num_value_samples off_policy_mask_threshold padding_value port precompute_ref_batch_size
    precompute_ref_log_probs queue_maxsize ref_model_mixup_alpha ref_model_sync_steps
    remove_thinking_from_demonstration repetition_penalty reprompt_template request_timeout
    reverse_kl_top_1_mode revision reward_clip_range reward_funcs reward_model_name_or_path
    reward_model_path reward_weights sapo_temperature_neg sapo_temperature_pos scale_rewards seq_kd
    simpo_gamma solution_template speculative_config steps_per_generation success_reward_threshold
    sync_ref_model teacher_model_init_kwargs teacher_model_kind teacher_model_name_or_path
    teacher_model_revision teacher_model_server_url teacher_prompt_template teacher_server_urls
    teacher_sync_steps teacher_temperature teacher_tokenizer_name_or_path teacher_top_k teacher_update_rate
    temperature tensor_parallel_size token_budget top_entropy_quantile top_k top_p tpo_alpha tpo_l_gamma
    transformers_continuous_batching_config uld_crossentropy_weight uld_distillation_weight
    uld_hybrid_matched_weight uld_hybrid_unmatched_weight uld_skip_student_eos uld_skip_teacher_eos
    uld_student_temperature uld_teacher_temperature uld_token_merge_strategy uld_use_hybrid_loss
    undesirable_weight use_adaptive_entropy use_bias_correction_kl use_extended_uld
    use_successful_as_teacher use_teacher_server use_transformers_continuous_batching use_transformers_paged
    use_uld_loss use_vllm use_weighting vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_sync_frequency
    vllm_tensor_parallel_size wandb_log_unique_prompts weight_sync_steps weight_sync_timeout
""")
"""TRL 1.16.0: the keys of its other trainers' configs (DPO, KTO, ORPO, GRPO, RLOO, reward, distillation…) that
SFTConfig does not have; some of them once belonged to SFTConfig."""

TRL_LAUNCHER = key_set("""
    accelerate_config cpu config_file deepspeed_config_file fsdp_config_file gpu_ids machine_rank main_process_ip
    main_process_port mixed_precision multi_gpu num_cpu_threads_per_process num_machines num_processes rdzv_backend
    same_network use_deepspeed use_fsdp zero_stage dynamo_backend debug_launcher
""")
"""TRL 1.16.0: the keys that it passes to `accelerate launch` (cli/accelerate_config.py)."""

OPEN_R1 = key_set("""
    benchmarks callbacks chat_template hub_model_revision num_completions_to_print overwrite_hub_revision
    push_to_hub_revision system_prompt wandb_entity wandb_project wandb_run_group
""")
"""Keys that open-r1 adds to TRL's SFTConfig and GRPOConfig; its files look like TRL's (src/open_r1/configs.py)."""

LORA_CONFIG = key_set("""
    alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias corda_config
    ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights kasa_config
    layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout
    lora_ga_config megatron_config megatron_core modules_to_save monteclora_config peft_type peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters task_type
    trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config
""")
"""PEFT 0.21.2, LoraConfig."""

LLAMAFACTORY = key_set("""
    adapter_folder adapter_name_or_path add_special_tokens add_tokens additional_target apollo_layerwise
    apollo_proj apollo_proj_type apollo_rank apollo_scale apollo_scale_front apollo_scale_type apollo_target
    apollo_update_interval asft_alpha audio_sampling_rate badam_mask_mode badam_mode badam_start_block
    badam_switch_interval badam_switch_mode badam_update_ratio badam_verbose buffer_size
    cache_dir compute_accuracy create_new_adapter crop_to_patches cutoff_len
    data_shared_file_system dataset dataset_dir default_system disable_gradient_checkpointing
    disable_shuffling do_sample double_quantization dpo_label_smoothing eaft_alpha early_stopping_steps
    enable_liger_kernel enable_thinking enable_torch_profiler eval_dataset eval_num_beams eval_on_each_dataset
    export_device export_dir export_hub_model_id export_legacy_format export_quantization_bit
    export_quantization_dataset export_quantization_maxlen export_quantization_nsamples export_size
    finetuning_type flash_attn fp8 fp8_backend fp8_enable_fsdp_float8_all_gather freeze_extra_modules
    freeze_language_model freeze_multi_modal_projector freeze_trainable_layers freeze_trainable_modules
    freeze_vision_tower galore_layerwise galore_proj_type galore_rank galore_scale galore_target
    galore_update_interval generation_config generation_max_length generation_num_beams hf_hub_token
    hyper_parallel_args ignore_pad_token_for_loss image_do_pan_and_scan image_max_pixels image_min_pixels
    include_effective_tokens_per_second infer_backend infer_dtype init_special_tokens interleave_probs
    kt_config kt_cpu_activation kt_expert_checkpoint_path kt_lora_expert_intermediate_size kt_lora_expert_num
    kt_use_lora_experts
    kt_weight_path kto_chosen_weight kto_rejected_weight ld_alpha length_penalty lora_alpha lora_dropout
    lora_rank lora_target loraplus_lr_embedding loraplus_lr_ratio low_cpu_mem_usage mask_history master_addr
    master_port max_length max_new_tokens max_samples media_dir mix_strategy mixture_of_depths
    model_name_or_path model_revision module_dropout moe_aux_loss_coef ms_hub_token neat_packing
    new_special_tokens_config num_beams offload_folder oft_block_size oft_rank oft_target om_hub_token
    overwrite_cache overwrite_output_dir packing pissa_convert pissa_init pissa_iter plot_loss ppo_buffer_size
    ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards predict_with_generate pref_bco_weight pref_beta
    pref_ftx pref_loss preprocessing_batch_size preprocessing_num_workers preserve_thinking print_param_status
    profile_modules profiler_active_steps profiler_output_dir profiler_profile_memory profiler_record_shapes
    profiler_repeat profiler_wait_steps profiler_warmup_steps profiler_with_stack pure_bf16 quantization_bit
    quantization_device_map quantization_method quantization_type ray_init_kwargs ray_num_workers ref_model
    ref_model_adapters ref_model_quantization_bit repetition_penalty resize_vocab reward_model
    reward_model_adapters reward_model_quantization_bit reward_model_type rope_scaling sglang_config
    sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size shift_attn simpo_gamma
    skip_special_tokens sortish_sampler split_special_tokens stage streaming swanlab_api_key swanlab_lark_secret
    swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_project swanlab_run_name swanlab_workspace
    temperature template tokenized_path tool_format top_k top_p train_from_scratch train_on_prompt
    trust_remote_code upcast_layernorm upcast_lmhead_output use_adam_mini use_apollo use_asft_loss
    use_audio_in_video use_badam use_dft_loss use_dora use_eaft_loss use_fast_tokenizer use_galore
    use_hyper_parallel use_kt use_kv_cache use_llama_pro use_mca use_muon use_reentrant_gc use_rslora
    use_swanlab use_unsloth use_unsloth_gc use_v1_kernels val_size video_fps video_max_pixels video_maxlen
    video_min_pixels vllm_config vllm_enforce_eager vllm_gpu_util vllm_max_lora_rank vllm_maxlen
""")
"""LLaMA-Factory 0.9.5: all argument classes without the derived fields (compute_dtype, device_map…), and the fields
that Seq2SeqTrainingArguments adds; kt_config and kt_cpu_activation come from KTransformers' release of it."""

AXOLOTL = key_set("""
    accelerator_config activation_offloading adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2 adapter
    added_tokens_overrides attn_implementation auto_find_batch_size auto_resume_from_checkpoints
    axolotl_config_path base_model base_model_config batch_flattening batch_size bench_dataset bench_split bf16
    bfloat16 bnb_config_kwargs center_rewards_coefficient chat_template chat_template_jinja chat_template_kwargs
    chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config comet_api_key
    comet_experiment_config comet_experiment_key comet_mode comet_online comet_project_name comet_workspace
    context_parallel_size cosine_constant_lr_ratio cosine_min_lr_ratio cpo_alpha curriculum_sampling
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
    dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes
    dataset_shard_idx dataset_shard_num datasets ddp ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_timeout deepcompile deepspeed default_system_message device device_map
    dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval do_causal_lm_eval
    dp_replicate_size dp_shard_size dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_padding_free
    dpo_use_liger_kernel dpo_use_weighting dynamic_checkpoint eaft_alpha eaft_k eager_attention
    early_stopping_patience ebft embedding_lr embedding_lr_scale embeddings_skip_upcast eot_tokens
    eval_batch_size eval_causal_lm_metrics eval_sample_packing eval_sequence_len eval_steps eval_strategy
    evals_per_epoch excess_length_strategy experimental_skip_move_to_device experts_implementation
    fix_untrained_tokens flash_attention flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp
    flash_optimum flex_attention flex_attn_compile_kwargs float16 float32 fp16 fp32_norm_classes fp32_norms fp8
    fp8_config fp8_enable_fsdp_float8_all_gather freeze_mm_modules fsdp fsdp_config fsdp_final_state_dict_type
    fsdp_version fused_attn_kernel gc_collect_steps gc_steps gemma4_hybrid_attn_impl generate_samples
    generation_do_sample generation_max_new_tokens generation_prompt_ratio generation_temperature
    generation_top_k generation_top_p gptq gpu_memory_limit gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs gradio_max_new_tokens gradio_server_name gradio_server_port gradio_share
    gradio_temperature gradio_title greater_is_better group_by_length heads_k_stride hf_mlflow_log_artifacts
    hf_use_auth_token hub_model_id hub_revision hub_strategy image_resize_algorithm image_size include_tkps
    include_tokens_per_second is_falcon_derived_model is_llama_derived_model is_mistral_derived_model
    is_preprocess is_qwen_derived_model jagged_restart_anneal_steps jagged_restart_steps
    jagged_restart_warmup_steps kto_desirable_weight kto_undesirable_weight large_head_attention
    layer_offloading learning_rate lisa_layers_attribute lisa_n_layers lisa_step_interval
    llama4_linearized_experts load_best_model_at_end load_in_4bit load_in_8bit local_rank logging_steps
    lora_alpha lora_alpha_pattern lora_dropout lora_embedding_kernel lora_fan_in_fan_out lora_mlp_kernel
    lora_model_dir lora_modules_to_save lora_o_kernel lora_on_cpu lora_qkv_kernel lora_r lora_rank_pattern
    lora_target_linear lora_target_modules lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio
    loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage lr_div_factor lr_groups lr_quadratic_warmup
    lr_scheduler lr_scheduler_kwargs max_grad_norm max_memory max_prompt_len max_steps mean_resizing_embeddings
    merge_lora merge_method metric_for_best_model micro_batch_size min_sample_len mlflow_experiment_name
    mlflow_run_name mlflow_tracking_uri model_config model_kwargs model_quantization_config
    model_quantization_config_kwargs model_revision model_type multipack_real_batches neftune_noise_alpha
    num_dataset_shards_to_save num_epochs num_generation_samples num_labels optim_args optim_target_modules
    optimizer orpo_alpha otel_metrics_host otel_metrics_port output_dir overrides_of_model_config
    overrides_of_model_kwargs pad_to_multiple_of pad_to_sequence_len peft peft_autocast_adapter_dtype
    peft_ensure_weight_tying peft_init_lora_weights peft_layer_replication peft_layers_pattern
    peft_layers_to_transform peft_trainable_token_indices peft_use_dora peft_use_rslora ple_cpu_offload plugins
    pose_max_context_len pose_num_chunks pose_split_on_token_ids precompute_ref_log_probs preprocess_iterable
    pretrain_multipack_attn pretrain_multipack_buffer_size pretraining_dataset pretraining_sample_concatenation
    process_reward_model processor_kwargs processor_type profiler_steps profiler_steps_start push_dataset_to_hub
    qat qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant
    qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap
    qlora_sharded_model_loading quantization quantize_moe_experts ray_num_workers ray_run_name reinit_weights
    relora relora_cpu_offload relora_prune_method relora_prune_ratio remove_unused_columns
    resize_token_embeddings_to_32x resources_per_worker resume_from_checkpoint revision_of_model reward_model
    ring_attn_func rl rl_beta role_boundaries sage_attention sample_packing sample_packing_bin_size
    sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method sample_packing_sequentially
    save_first_step save_only_model save_safetensors save_steps save_strategy save_total_limit saves_per_epoch
    scaling_softmax scaling_softmax_bias scaling_softmax_factor sdp_attention sdpa_varlen seed
    selective_checkpointing sequence_len sequence_parallel_degree shrink_embeddings
    shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma skip_prepare_dataset special_tokens
    streaming streaming_multipack_buffer_size strict tensor_parallel_size test_datasets tf32 tiled_mlp
    tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_config tokenizer_legacy tokenizer_save_jinja_files
    tokenizer_type tokenizer_use_fast tokenizer_use_mistral_common tokens torch_compile torch_compile_backend
    torch_compile_mode torch_compile_options torch_empty_cache_steps torchdistx_path total_num_tokens
    total_supervised_tokens trackio_project_name trackio_run_name trackio_space_id train_on_inputs trainer_cls
    trl trust_remote_code type_of_model unfrozen_parameters use_comet use_eaft use_kernels use_mlflow
    use_onebitllms use_otel_metrics use_pose use_ray use_tensorboard use_trackio use_wandb val_set_size vllm
    wandb_entity wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio
    warmup_steps weight_decay world_size xformers_attention
""")
"""Axolotl 0.19.0, AxolotlInputConfig."""

AXOLOTL_PLUGINS = key_set("""
    cut_cross_entropy dense_mixer diffusion dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel
    dsv4_fp8_nonexpert_mode dsv4_shared_mlp_lora_kernel expert_backend expert_parallel_backend
    expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
    expert_parallel_size expert_parallel_token_capacity gemma4_fp8_nonexpert gemma4_nf4_nonexpert grokfast_alpha
    grokfast_lamb hatchery kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server
    kd_online_server_base_url kd_online_timeout kd_online_topk kd_temperature kd_temperature_min kd_trainer
    liger_cross_entropy liger_fused_linear_cross_entropy liger_glu_activation liger_kernel_impl liger_layer_norm
    liger_rms_norm liger_rms_norm_gated liger_rope liger_swiglu liger_use_token_scaling llmcompressor
    lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks moe_bnb_fast moe_dequant_chunk_size
    moe_grouped_backend mora nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets
    nemo_gym_dir nemo_gym_enabled nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn
    nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout nonexpert_quantization
    nvfp4_merge_aware nvfp4_merge_aware_start_step spectrum_model_name spectrum_top_fraction swanlab_api_host
    swanlab_api_key swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_description
    swanlab_experiment_name swanlab_lark_secret swanlab_lark_webhook_url swanlab_log_completions
    swanlab_log_model swanlab_mode swanlab_project swanlab_web_host swanlab_workspace use_dsv4_kernels
    use_glm_dsa_kernels use_scattermoe use_sonicmoe use_swanlab
""")
"""Axolotl 0.19.0, the keys of the plugins that it ships."""

ACCELERATE = key_set("""
    additional_args base_job_name command_file commands compute_environment debug deepspeed_config
    distributed_type downcast_bf16 dynamo_backend dynamo_config ec2_instance_type enable_cpu_affinity fp16
    fp8_config fsdp_config gpu_ids iam_role_name image_uri machine_rank main_process_ip main_process_port
    main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes
    parallelism_config profile py_version pytorch_version rdzv_backend region sagemaker_inputs_file
    sagemaker_metrics_file same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone
    transformers_version use_cpu
""")
"""accelerate 1.15.0, ClusterConfig and SageMakerConfig, with two older keys that it converts."""

DEEPSPEED = key_set("""
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_config comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency
    data_parallel_size data_types dataloader_drop_last datastates_ckpt disable_allgather dump_state eigenvalue
    elasticity expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine log_level
    managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop scheduler seq_parallel_comm_data_type
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention
    sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
""")
"""DeepSpeed 0.19, runtime/config.py."""

ZERO = key_set("""
    allgather_bucket_size allgather_partitions allgather_sequential contiguous_gradients cpu_offload
    cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear
    mics_hierarchical_params_gather mics_shard_size model_persistence_threshold module_granularity_threshold
    offload_optimizer offload_param overlap_comm override_module_apply param_persistence_threshold
    partition_stream_chunk_size pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size
    reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_partition_stream_chunk_size
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size
    zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights zeropp_loco_param
""")
"""DeepSpeed 0.19, runtime/zero/config.py; the stage-3 keys also under their short names."""

SFT_CONFIG = key_set("""
    activation_offloading assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_num_proc
    dataset_text_field eos_token eval_packing loss_type max_length model_init_kwargs packing packing_strategy
    pad_to_multiple_of pad_token padding_free router_aux_loss_coef shuffle_dataset truncation_mode trust_remote_code
""")
"""TRL 1.16.0, the keys that SFTConfig adds to TrainingArguments."""

SEQ2SEQ = key_set("generation_config generation_max_length generation_num_beams predict_with_generate sortish_sampler")
"""transformers 5.23.0, the keys that Seq2SeqTrainingArguments adds to TrainingArguments."""

TRAINER = key_set("""
    args callbacks compute_loss_func compute_metrics data_collator eval_dataset model model_init
    optimizer_cls_and_kwargs optimizers preprocess_logits_for_metrics processing_class train_dataset
""")
"""transformers 5.23.0, Trainer."""

SFT_TRAINER = (TRAINER - {"model_init"}) | key_set("formatting_func peft_config quantization_config")
"""TRL 1.16.0, SFTTrainer."""
