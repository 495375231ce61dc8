"""The verb `calibrate`: measure the speed of this machine's device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, MachineError
from surefit.core.output import json_with, output_file
from surefit.core.units import bytes_text, duration_text

if TYPE_CHECKING:
    from surefit.plan.profile import DeviceProfile


@verb
def calibrate(
    out: Output,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile here as well.")] = None,
) -> int:
    """Measure how fast this machine's GPU (or CPU) is, so that `plan` need not believe the data sheet."""
    from surefit.plan.calibrate import calibrate_device

    if output is not None:
        output_file(output, earlier=json_with("device", "matmul", "copy"))
    profile = calibrate_device(lambda what: out.note(f"measuring {what}"))
    profile.save(profile.stored_at)
    if output is not None:
        try:
            profile.save(output)
        except OSError as error:
            message = f"cannot write: {error.strerror}; the profile is in {profile.stored_at}"
            raise MachineError(
                message, code="E1009", path=output, field="--output", help="choose another place"
            ) from None
    _say(out, profile)
    out.result(asdict(profile) | {"stored_at": str(profile.stored_at)})
    return EXIT_OK


def _say(out: Output, profile: DeviceProfile) -> None:
    driver = f", driver {profile.driver}" if profile.driver else ""
    out.say(f"{profile.device}: torch {profile.torch}{driver}, in {duration_text(profile.seconds)}", "bold")
    rows = [
        [f"products in {dtype}", f"{max(speed for _, speed in curve) / 1e9:,.0f} GFLOP/s at best"]
        for dtype, curve in profile.matmul.items()
    ]
    rows += [
        [f"attention, {name}", f"{max(speed for _, speed in curve) / 1e9:,.0f} GFLOP/s at best"]
        for name, curve in profile.attention.items()
    ]
    rows.append(["copies", f"{profile.copy[-1][1] / 1e9:.3g} GB/s"])
    rows.append(["a kernel, besides its work", f"{profile.launch * 1e6:.3g} µs"])
    for quantity, size in (("CUDA context", profile.context_bytes), ("cuBLAS workspace", profile.workspace_bytes)):
        if size is not None:
            rows.append([quantity, bytes_text(size)])
    out.table("Measured", ["what", "speed or size"], rows)
    out.say(f"`surefit plan` uses it from now on: {profile.stored_at}")
