"""The rules, one module per family. A code is a family's three letters and a number, and is never used again."""

FAMILIES = {
    "BAT": "schedule",
    "CFG": "config",
    "DAT": "data",
    "DSK": "disk",
    "ENV": "environment",
    "INT": "internal",
    "MEM": "memory",
    "MOD": "model",
    "PRC": "precision",
    "SCH": "schedule",
    "SEC": "security",
}
"""A code's first three letters → the module that defines it."""
