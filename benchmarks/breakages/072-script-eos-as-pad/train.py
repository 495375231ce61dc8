from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

checkpoint = "EleutherAI/pythia-410m"
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(checkpoint)

raw = load_dataset("wikitext", "wikitext-2-raw-v1")


def tokenize(batch):
    return tokenizer([t + tokenizer.eos_token for t in batch["text"]], truncation=True, max_length=512)


data = raw.map(tokenize, batched=True, remove_columns=["text"])
data = data.filter(lambda row: len(row["input_ids"]) > 8)

args = TrainingArguments(
    output_dir="runs/wikitext",
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    learning_rate=5e-5,
    num_train_epochs=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    warmup_steps=50,
    bf16=True,
    logging_steps=20,
)
trainer = Trainer(
    model=model,
    args=args,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    train_dataset=data["train"],
    eval_dataset=data["validation"],
)
trainer.train()
