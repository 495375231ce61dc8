#!/bin/bash
set -euo pipefail
export OMP_NUM_THREADS=8
source .venv/bin/activate

torchrun --standalone --nproc_per_node=4 train.py
