"""Room on the file system of the fixture `small_disk`, a tmpfs of its own: full is what it really is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def room(place: Path, free: int) -> None:
    """Let so many bytes be free there."""
    used = shutil.disk_usage(place).used
    subprocess.run(["mount", "-o", f"remount,size={used + free}", str(place)], check=True)
