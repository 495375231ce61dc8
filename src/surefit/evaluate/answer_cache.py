"""Caches answers on disk as they are generated, so that an interrupted evaluation continues where it stopped.

The file lies beside the scores while a variant generates answers, and is deleted after the scores are written. Its
first line holds the model and the generation settings; every other line holds one row's answer, with a key made of row
and prompt. If several processes share the rows, each writes its own file and reads the files of all.
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
    """Cache of the answers of one variant to one set.

    Args:
        path: the file; None disables the cache.
        asked: the model and the settings that answers depend on, as JSON. Answers of another model, or with other
            settings, are discarded as soon as there are new ones.
        rank: rank of this process; from rank 1 on the file's name contains it.
    """

    def __init__(self, path: Path | None, asked: Mapping[str, Any], rank: int = 0) -> None:
        self.path, self.header = path, _line({"asked": asked})
        self._every = f"{path.stem}*.jsonl" if path is not None else ""
        if path is not None and rank:
            self.path = path.with_name(f"{path.stem}.{rank}.jsonl")
        self._ours = False

    def read(self) -> dict[str, tuple[GeneratedAnswer, float]]:
        """Return key → (answer, seconds that it took), including answers of other processes and earlier calls."""
        other_files = (self._of_other(path) for path in self._files() if path != self.path)
        return {key: value for answers in (*other_files, self._own()) for key, value in answers.items()}

    def _files(self) -> list[Path]:
        return sorted(self.path.parent.glob(self._every)) if self.path is not None else []

    def _of_other(self, path: Path) -> dict[str, tuple[GeneratedAnswer, float]]:
        """Read another process's file. It may still be written: only complete lines count, and the file is not
        repaired."""
        try:
            header, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
        except FileNotFoundError:
            return {}
        return dict(_read(json.loads(line)) for line in lines if line.endswith(b"\n")) if header == self.header else {}

    def _own(self) -> dict[str, tuple[GeneratedAnswer, float]]:
        if self.path is None or not self.path.exists():
            return {}
        header, *lines = self.path.read_bytes().splitlines(keepends=True) or [b""]
        complete_lines = [line for line in lines if line.endswith(b"\n")]
        self._ours = header == self.header
        if not self._ours:
            return {}
        if complete_lines != lines:  # the last line is incomplete, and would damage the next
            os.truncate(self.path, len(header) + sum(map(len, complete_lines)))
        return dict(_read(json.loads(line)) for line in complete_lines)

    def add(self, answers: Iterable[tuple[str, GeneratedAnswer]], seconds: float) -> None:
        """Append answers; they are on the disk when this returns.

        Args:
            seconds: duration of each answer.

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
        """Delete the files of all processes, after their answers have been scored."""
        for path in self._files():
            path.unlink(missing_ok=True)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=False).encode() + b"\n"


def _written(key: str, answer: GeneratedAnswer, seconds: float) -> dict[str, Any]:
    generations = [[generation.text, generation.truncated, generation.tokens] for generation in answer.generations]
    return {"key": key, "seconds": seconds} | (
        {"made": generations} if answer.ranked is None else {"ranked": answer.ranked}
    )


def _read(line: Mapping[str, Any]) -> tuple[str, tuple[GeneratedAnswer, float]]:
    generations = tuple(Generation(text, truncated, tokens) for text, truncated, tokens in line.get("made", ()))
    return line["key"], (GeneratedAnswer(generations, line.get("ranked")), line["seconds"])
