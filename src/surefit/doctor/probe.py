"""The result of one probe of the doctor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Probe:
    """One fact about the machine.

    Attributes:
        name: what was tested.
        fact: the result.
        verdict: ok; info, if something optional is not set up; warn, if something will be slower or missing; fail, if
            SureFit will not work.
        fix: the remedy, as a command if there is one; None if nothing needs to be done.
        is_command: whether `fix` is a shell command that can be run as it is.
    """

    name: str
    fact: str
    verdict: Verdict = "ok"
    fix: str | None = None
    is_command: bool = False

    def as_dict(self) -> dict[str, str | bool | None]:
        return asdict(self)
