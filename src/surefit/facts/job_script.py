"""What a SLURM batch script asks for, and what it launches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobScript:
    """What a SLURM batch script asks for, and what it launches."""
