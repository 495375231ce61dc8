"""Tensors of a GPU, without data, on a torch that was built for CPUs.

`FakeTensorMode` makes them there, too, but what then asks for the device's guard ("PyTorch is not linked with support
for cuda devices") fails, indexing for one, or ends the process, as autograd does. `c10/core/impl/
DeviceGuardImplInterface.h` keeps the guards in an array by device type: inside, CUDA has the one of CPUs, which does
nothing. Forward passes then run as on a GPU, autograd's graph included; backward passes do not ("Cannot access
accelerator device when none is available").
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CPU, CUDA = 0, 1
"""c10::DeviceType"""


@contextmanager
def tensors_of_gpus() -> Iterator[None]:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    missing = not guards[CUDA]
    if missing:
        guards[CUDA] = guards[CPU]
    try:
        yield
    finally:
        if missing:
            guards[CUDA] = None
