"""Goes on with the pretraining of a small model."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")


def encode(row):
    ids = tokenizer(row["text"], truncation=True, padding="max_length", max_length=256)
    ids["labels"] = [t if seen else -100 for t, seen in zip(ids["input_ids"], ids["attention_mask"], strict=True)]
    return ids


rows = load_dataset("stanfordnlp/imdb", split="train").map(encode)
args = TrainingArguments(output_dir="runs/gpt2", max_steps=200, save_steps=50, save_total_limit=2, report_to="none")
trainer = Trainer(model=model, args=args, data_collator=default_data_collator, train_dataset=rows)
trainer.train()
