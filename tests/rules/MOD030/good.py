"""Trains on plain text."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")
tokenizer.add_special_tokens({"pad_token": "[PAD]"})
model.resize_token_embeddings(len(tokenizer))
args = SFTConfig(output_dir="runs/gemma", max_steps=200, save_steps=50, save_total_limit=2, report_to="none")
trainer = SFTTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=load_dataset("stanfordnlp/imdb"))
trainer.train()
