"""Models: loaded whole or rejected (load), and extended by LoRA factors (adapter)."""
