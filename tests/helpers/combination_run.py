"""One of the processes that try out combinations: `combination_run.py BASE OUT RESULT JOBS`.

JOBS is a JSON list of configs with nothing in them that is "auto"; each takes two steps, from the dry pass to the
exported result, on a CPU whatever hardware its values are for. RESULT gets, for each, the error it ended with or None.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from tiny_run import pairs, rows, training

from surefit.config.schema import SureFitConfig
from surefit.core.errors import SureFitError
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World, barrier, process_group


def on_tiny(values: dict[str, Any], base: str, out: str) -> SureFitConfig:
    """The config as it is, on a model and lengths that take a second."""
    values["model"]["name_or_path"] = base
    values["data"] |= {"train": "unused", "max_length": 24}
    values["checkpoint"]["save_steps"] = 2
    if values["parallel"]["mode"].startswith("zero") and values["model"]["dtype"] == "float16":
        values["model"]["dtype"] = "bfloat16"  # DeepSpeed: "Type fp16 is not supported on your device", a CPU
    values["output_dir"] = out
    return SureFitConfig.model_validate(values)


def tried(config: SureFitConfig, world: World) -> dict[str, Any] | None:
    """What two steps end with."""
    try:
        some = pairs if config.objective.paired else rows
        job = training(config, some(8), some(2, seed=1), engine=build_engine(config.parallel, world))
        result = job.fit()
    except SureFitError as error:
        return {"kind": "refused", "text": error.message, "field": error.field}
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error)[:600], "trace": traceback.format_exc()[-3000:]}
    if result.counters.step != 2 or result.counters.rejected:
        return {"kind": "wrong", "text": f"{result.counters.step} steps, {result.counters.rejected} rejected"}
    return None


def traced_only() -> None:
    """Trace the layers, which is what settings can break, and run the graph as it is: to generate code takes a minute
    for each; tests/unit/model/test_compile.py has that."""
    whole = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **options: whole(self, **options | {"backend": "eager"})


def main(base: str, out: str, result: str, jobs: str) -> None:
    torch.set_num_threads(1)
    traced_only()
    world = World.current()
    with process_group(world, 1.0):
        for number, values in enumerate(json.loads(Path(jobs).read_text())):
            place = f"{out}/{number}"
            found = tried(on_tiny(values, base, place), world)
            torch._dynamo.reset()
            if world.is_first:
                with open(result, "a") as lines:
                    lines.write(json.dumps(found) + "\n")
            if found and found["kind"] not in ("refused", "wrong"):
                sys.exit(7)  # the others may wait for what this process will never send
            barrier(world)
            if world.is_first:
                shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
