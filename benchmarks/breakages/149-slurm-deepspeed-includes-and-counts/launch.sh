#!/bin/bash
#SBATCH --job-name=sft-8b
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
#SBATCH --mem=240G
#SBATCH --time=12:00:00
#SBATCH --output=sft-%j.out

set -euo pipefail
source ~/venvs/llm/bin/activate
export OMP_NUM_THREADS=8
export TOKENIZERS_PARALLELISM=false

deepspeed --num_gpus 4 --include localhost:0,1,2,3 train.py \
    --model_name_or_path meta-llama/Llama-3.1-8B \
    --dataset tatsu-lab/alpaca \
    --learning_rate 1e-5 \
    --per_device_train_batch_size 2 \
    --output_dir $HOME/runs/$SLURM_JOB_ID
