import argparse

import yaml
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="settings.yaml")
cfg = yaml.safe_load(open(parser.parse_args().config))

tokenizer = AutoTokenizer.from_pretrained(cfg["model"]["name"])
tokenizer.add_special_tokens({"pad_token": "<|padding|>"})
model = AutoModelForCausalLM.from_pretrained(cfg["model"]["name"])
data = load_dataset(cfg["data"]["name"], split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=cfg["data"]["tokens"]))
data = data.remove_columns(["text"])
args = TrainingArguments(
    output_dir=cfg["out"],
    learning_rate=float(cfg["optim"]["lr"]),
    num_train_epochs=cfg["optim"]["epochs"],
    per_device_train_batch_size=cfg["optim"]["rows"],
)
Trainer(
    model=model,
    args=args,
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
).train()
