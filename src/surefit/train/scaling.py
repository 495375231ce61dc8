"""Dynamic loss scaling, which keeps gradients representable in float16 on GPUs without bfloat16.

The smallest positive number of float16 is 6e-8, and many gradients are smaller: they would become zero. So the loss is
multiplied by a large scale before the backward pass, and every gradient, in float32, is divided by it again. If the
scale was too large, some gradient is infinite: that step is skipped and the scale halved. It grows again after many
good steps. The scale is always a power of two, so scaling does not round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

START = 2.0**16
MINIMUM = 1.0
GROWTH_INTERVAL = 2000
"""Number of consecutive good steps after which the scale doubles. This and `START` are the defaults of
`torch.amp.GradScaler`."""


@dataclass
class LossScale:
    """Loss scale and its step counter; a checkpoint stores both numbers.

    Attributes:
        value: factor that the loss is multiplied by.
        good_steps: consecutive good steps since the scale last changed.
    """

    value: float = START
    good_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Return whether a smaller scale is possible; if not, gradients that are not finite are a fault of the run."""
        return self.value > MINIMUM

    def grow(self) -> None:
        """Count a step with finite gradients; double the scale after `GROWTH_INTERVAL` of them.

        There is no upper limit: a scale that is too large costs one step, and is halved.
        """
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def shrink(self) -> None:
        """Halve the scale after a step with gradients that were not finite."""
        self.value, self.good_steps = max(MINIMUM, self.value / 2), 0

    def state(self) -> dict[str, float]:
        """Return the state as a checkpoint's trainer.json stores it."""
        return asdict(self)

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state` returned."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
