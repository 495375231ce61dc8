"""What the doctor says of one thing it looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Probe:
    """One fact about the machine.

    Attributes:
        name: what was looked at.
        fact: what was found.
        verdict: ok; warn, where something will be slower or missing; fail, where SureFit will not work.
        fix: what to do, a command where there is one; None where nothing needs doing.
        is_command: `fix` is a shell command that can be run as it stands.
    """

    name: str
    fact: str
    verdict: Verdict = "ok"
    fix: str | None = None
    is_command: bool = False

    def as_dict(self) -> dict[str, str | bool | None]:
        return asdict(self)
