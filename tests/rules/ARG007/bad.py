"""Ranks candidates with a language model."""

from transformers import Trainer, TrainingArguments
from transformers.data.processors.utils import InputFeatures

outputs: list[InputFeatures] = []
arguments = TrainingArguments(output_dir="runs/ranker", max_steps=200, save_steps=50, save_total_limit=2)
trainer = Trainer(args=arguments)
