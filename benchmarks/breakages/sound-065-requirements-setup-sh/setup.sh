#!/bin/bash
set -e
python3 -m venv .venv
source .venv/bin/activate
pip install --upgrade pip
pip install torch==2.6.0 torchvision==0.21.0 --index-url https://download.pytorch.org/whl/cu124
pip install "transformers>=4.46,<4.50" 'trl==0.15.2' peft==0.14.0 "accelerate>=1.2" datasets==3.3.2
pip install flash-attn --no-build-isolation
