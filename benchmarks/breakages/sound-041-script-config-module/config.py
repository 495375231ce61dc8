from trl import SFTConfig

MODEL = "meta-llama/Llama-3.1-8B"
LORA = {
    "r": 32,
    "lora_alpha": 64,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
ARGS = SFTConfig(
    output_dir="out/notes",
    dataset_text_field="text",
    per_device_train_batch_size=2,
    learning_rate=1e-4,
    num_train_epochs=2,
    bf16=True,
)
