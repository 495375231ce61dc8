import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

name = "Qwen/Qwen2.5-1.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(name)

train = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
train = train.rename_columns({"chosen": "accepted"})

config = DPOConfig(
    output_dir="out/dpo",
    beta=0.1,
    loss_type="sigmoid",
    learning_rate=5e-6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    num_train_epochs=1,
    max_length=1024,
    bf16=True,
    logging_steps=5,
)
trainer = DPOTrainer(
    model=model,
    args=config,
    train_dataset=train,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("out/dpo/final")
