"""Dynamic loss scaling: how gradients stay representable in float16, on GPUs that have no bfloat16.

The smallest number of float16 is 6e-8, and many gradients are smaller: they would become zero. So the loss is
multiplied by a large scale before the backward pass and every gradient, in float32, divided by it again. Where the
scale was too large, some gradient is infinite: that step is left out and the scale halved. It grows again after many
good steps. Powers of two only: scaling rounds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

START = 2.0**16
MINIMUM = 1.0
GROWTH_INTERVAL = 2000
"""Good steps in a row after which the scale doubles. This and `START` are those of `torch.amp.GradScaler`."""


@dataclass
class LossScale:
    """The scale, and when it changes; a checkpoint keeps both numbers.

    Attributes:
        value: what the loss is multiplied by.
        good_steps: in a row, since the scale last changed.
    """

    value: float = START
    good_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale is left to try; if not, gradients that are not finite are a fault of the run."""
        return self.value > MINIMUM

    def grow(self) -> None:
        """Count a step whose gradients were finite; double the scale when there were enough of them.

        Without a limit: a scale that is too large costs one step, and is halved.
        """
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def shrink(self) -> None:
        """Halve the scale after a step whose gradients were not finite."""
        self.value, self.good_steps = max(MINIMUM, self.value / 2), 0

    def state(self) -> dict[str, float]:
        """For a checkpoint's trainer.json."""
        return asdict(self)

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
