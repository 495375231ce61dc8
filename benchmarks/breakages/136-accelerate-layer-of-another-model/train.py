from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

MODEL = "mistralai/Mistral-7B-v0.3"
ARGS = SFTConfig(output_dir="out", learning_rate=1e-5, per_device_train_batch_size=1, bf16=True)


def main() -> None:
    data = load_dataset("stanfordnlp/imdb", split="train")
    trainer = SFTTrainer(
        model=MODEL,
        args=ARGS,
        train_dataset=data,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
