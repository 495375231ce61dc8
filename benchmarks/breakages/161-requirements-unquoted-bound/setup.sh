#!/bin/bash
set -e
python3 -m venv .venv
source .venv/bin/activate
pip install --upgrade pip
pip install torch==2.6.0 --index-url https://download.pytorch.org/whl/cu124
pip install transformers>=4.49 trl==0.15.2 peft
pip install flash-attn --no-build-isolation
hf download meta-llama/Llama-3.1-8B
