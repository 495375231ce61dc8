#!/bin/bash
set -e
pip install -r requirements.txt
trl sft --config sft.yaml
