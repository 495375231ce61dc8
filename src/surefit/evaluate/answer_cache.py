"""Answers kept on disk as they come, so that an evaluation that is killed goes on where it was.

The file lies beside the scores while a variant is being asked and is gone when they are written. Its first line says
which model was asked and how; every other line is a row's answer under a key that says which row and which prompt.
Of several processes that share the rows each writes a file of its own, and reads those of all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surefit.core.rundir import machine_errors
from surefit.evaluate.rows import GeneratedAnswer
from surefit.generate.engine import Generation


class AnswerCache:
    """The answers of one variant to one set.

    Args:
        path: the file; None keeps nothing.
        asked: the model and the settings that answers depend on, as JSON. Answers of another model, or made in another
            way, are forgotten as soon as there are new ones.
        rank: of this process; those behind the first have their number in the file's name.
    """

    def __init__(self, path: Path | None, asked: Mapping[str, Any], rank: int = 0) -> None:
        self.path, self.header = path, _line({"asked": asked})
        self._every = f"{path.stem}*.jsonl" if path is not None else ""
        if path is not None and rank:
            self.path = path.with_name(f"{path.stem}.{rank}.jsonl")
        self._ours = False

    def read(self) -> dict[str, tuple[GeneratedAnswer, float]]:
        """Key → the answer and the seconds it took; those of the other processes, and of an earlier call's, too."""
        others = (self._of_other(path) for path in self._files() if path != self.path)
        return {key: value for found in (*others, self._own()) for key, value in found.items()}

    def _files(self) -> list[Path]:
        return sorted(self.path.parent.glob(self._every)) if self.path is not None else []

    def _of_other(self, path: Path) -> dict[str, tuple[GeneratedAnswer, float]]:
        """It may be at work on it: only whole lines count, and nothing is fixed."""
        try:
            header, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
        except FileNotFoundError:
            return {}
        return dict(_read(json.loads(line)) for line in lines if line.endswith(b"\n")) if header == self.header else {}

    def _own(self) -> dict[str, tuple[GeneratedAnswer, float]]:
        if self.path is None or not self.path.exists():
            return {}
        header, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
        whole = [line for line in lines if line.endswith(b"\n")]
        self._ours = header == self.header
        if not self._ours:
            return {}
        if whole != lines:  # the last line was cut short, and would damage the next
            os.truncate(self.path, len(header) + sum(map(len, whole)))
        return dict(_read(json.loads(line)) for line in whole)

    def add(self, answers: Iterable[tuple[str, GeneratedAnswer]], seconds: float) -> None:
        """Append answers, on the disk when this returns.

        Args:
            seconds: that each of them took.

        Raises:
            MachineError: the disk is full.
        """
        if self.path is None:
            return
        data = b"".join(_line(_written(key, answer, seconds)) for key, answer in answers)
        with machine_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab" if self._ours else "wb") as file:
                file.write(data if self._ours else self.header + data)
                file.flush()
                os.fsync(file.fileno())
        self._ours = True

    def forget(self) -> None:
        """Remove the files of all processes: what is in them has been scored."""
        for path in self._files():
            path.unlink(missing_ok=True)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=False).encode() + b"\n"


def _written(key: str, answer: GeneratedAnswer, seconds: float) -> dict[str, Any]:
    made = [[one.text, one.truncated, one.tokens] for one in answer.generations]
    return {"key": key, "seconds": seconds} | ({"made": made} if answer.ranked is None else {"ranked": answer.ranked})


def _read(line: Mapping[str, Any]) -> tuple[str, tuple[GeneratedAnswer, float]]:
    made = tuple(Generation(text, truncated, tokens) for text, truncated, tokens in line.get("made", ()))
    return line["key"], (GeneratedAnswer(made, line.get("ranked")), line["seconds"])
