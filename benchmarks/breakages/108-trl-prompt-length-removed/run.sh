#!/bin/bash
set -e
pip install -r requirements.txt
trl dpo --config dpo.yaml
