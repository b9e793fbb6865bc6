"""The dynamic loss scale of float16 training (Micikevicius et al., arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

SMALLEST = 1.0


@dataclass(frozen=True)
class LossScale:
    """`scale` doubles after `window` steps without overflow and halves at each overflow. `good` counts the steps since its last change.

    Float32 and bfloat16 have the range of the loss: there `dynamic` is False and the scale stays.
    """

    scale: float = 1.0
    window: int = 1000
    good: int = 0
    dynamic: bool = False

    @property
    def may_fall(self) -> bool:
        """Whether a gradient that is not finite may be the scale's doing."""
        return self.dynamic and self.scale > SMALLEST

    def after(self, overflow: bool) -> LossScale:
        """The scale of the next step."""
        if not self.dynamic:
            return self
        if overflow:
            return replace(self, scale=max(SMALLEST, self.scale / 2), good=0)
        if self.good + 1 >= self.window:
            return replace(self, scale=self.scale * 2, good=0)
        return replace(self, good=self.good + 1)
