from config import ARGS, LORA, MODEL
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTTrainer


def main() -> None:
    data = load_dataset("stanfordnlp/imdb", split="train")
    trainer = SFTTrainer(
        model=MODEL,
        args=ARGS,
        train_dataset=data,
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
