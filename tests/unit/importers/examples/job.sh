#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
srun torchrun --nnodes=2 --nproc-per-node=4 train.py
