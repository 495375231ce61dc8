"""The rules, one module per family. A code is a family's three letters and a number, and is never reused."""

FAMILIES = {
    "ADP": "adapter",
    "ARG": "arguments",
    "AUD": "audit audit_texts audit_tasks audit_rendering audit_pairs",
    "BAT": "batch",
    "CFG": "config",
    "CKP": "checkpoint",
    "DAT": "data",
    "DSK": "disk",
    "ENV": "environment",
    "EVL": "evaluation",
    "INT": "internal",
    "LAB": "labels",
    "MEM": "memory",
    "MOD": "model start",
    "MRG": "merge",
    "PAR": "parallel",
    "PCK": "packing",
    "PRC": "precision",
    "SCH": "schedule",
    "SEC": "security",
    "SLM": "slurm slurm_syntax slurm_launch",
    "STK": "stack requirements",
    "TPL": "template reasoning",
    "TRK": "tracker",
}
"""A code's first three letters → the modules that define its rules."""
