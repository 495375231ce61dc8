"""Ranks candidates with a language model, on as many GPUs as there are."""

import torch
from transformers import Trainer, TrainingArguments

num_gpus = torch.cuda.device_count()
arguments = TrainingArguments(
    output_dir="runs/ranker",
    per_device_train_batch_size=4 * num_gpus,
    gradient_accumulation_steps=4,
    max_steps=200,
    save_steps=50,
    save_total_limit=2,
)
trainer = Trainer(args=arguments)
