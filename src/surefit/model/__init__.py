"""Models: loaded whole or refused (load), and given LoRA factors (adapter)."""
