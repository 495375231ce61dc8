import argparse

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path", required=True)
parser.add_argument("--dataset", default="tatsu-lab/alpaca")
parser.add_argument("--learning_rate", type=float, default=1e-5)
parser.add_argument("--per_device_train_batch_size", type=int, default=1)
parser.add_argument("--output_dir", required=True)
opt = parser.parse_args()

SFTTrainer(
    model=opt.model_name_or_path,
    args=SFTConfig(
        output_dir=opt.output_dir,
        learning_rate=opt.learning_rate,
        per_device_train_batch_size=opt.per_device_train_batch_size,
        bf16=True,
    ),
    train_dataset=load_dataset(opt.dataset, split="train"),
).train()
