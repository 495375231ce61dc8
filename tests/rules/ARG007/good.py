"""Ranks candidates with a language model."""

from transformers import Trainer, TrainingArguments
from transformers.utils import ModelOutput

outputs: list[ModelOutput] = []
arguments = TrainingArguments(output_dir="runs/ranker", max_steps=200, save_steps=50, save_total_limit=2)
trainer = Trainer(args=arguments)
