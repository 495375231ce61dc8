"""How a verb ends: every way it can becomes a message and an exit code."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import typer

from surefit import __version__
from surefit.core import env
from surefit.core.errors import EXIT_BUG, Interrupted, LostProcess, ShortOfMemory, SureFitError
from surefit.core.progress import heard_by
from surefit.core.units import printable


def finish(as_json: bool, verb: Callable[[Any], int], with_result: bool = True) -> None:
    """Run a verb; every way it can end becomes a message and an exit code."""
    from surefit.cli.render import Output

    out = Output(as_json, with_result, rank=env.process_place()[0])
    out.log.say(printable(env.redact(f"surefit {__version__}: {shlex.join(sys.argv[1:])}")))
    try:
        _say_what_was_set(out, env.load_dotenv())
        with heard_by(out.note):
            code = verb(out)
    except (Interrupted, LostProcess) as error:
        # Of several processes the first speaks for all that were asked to stop, the launcher of those that are lost.
        if not (out.rank if isinstance(error, Interrupted) else env.launched_here()):
            out.error(error)
        code = error.exit_code
    except ShortOfMemory as error:
        out.note_of_rank(error.message)
        code = error.exit_code
    except SureFitError as error:
        out.error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        out.note("interrupted")
        code = 130
    except BrokenPipeError:
        # The reader went away (`| head`): not our error, and there is no one left to tell.
        sys.stderr.close()
        code = 0
    except MemoryError:
        out.error(
            SureFitError(
                "out of memory (RAM)", code="E1013", help="lower train.per_device_train_batch_size or data.max_length"
            )
        )
        code = 3
    except Exception:
        code = _report_bug(out)
    raise typer.Exit(code)


def _say_what_was_set(out: Any, dotenv: env.Dotenv | None) -> None:
    """A process that this one starts finds it in its environment already, and says nothing."""
    if dotenv is None or not dotenv.taken + dotenv.left:
        return
    said = [f"sets {', '.join(dotenv.taken)}"] if dotenv.taken else []
    if dotenv.left:
        names = ", ".join(dotenv.left[:8]) + (" …" if len(dotenv.left) > 8 else "")
        said.append(f"may not set {names}: that belongs into the environment")
    out.note(f"{dotenv.path.name} here {'; it '.join(said)}")


def leave(ended: SystemExit) -> None:
    """End the process of a verb that leaves nothing to be finished, without taking apart what it has imported: with
    torch and transformers that takes a second and more. Comes back where the output cannot be written to its end, which
    Python says itself, or where `ended` is more than a code.
    """
    if not isinstance(ended.code, int):
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(ended.code)


def _report_bug(out: Any) -> int:
    with tempfile.NamedTemporaryFile("w", prefix="surefit-bug-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(env.redact(traceback.format_exc()))
    problem = traceback.format_exc(limit=0).strip().splitlines()[-1]
    error = SureFitError(
        f"SureFit did not expect this: {problem}",
        code="E1014",
        help=f"this is a bug in SureFit, please report it with {file.name}; what was saved before is still good",
    )
    error.exit_code = EXIT_BUG
    out.error(error)
    return EXIT_BUG
