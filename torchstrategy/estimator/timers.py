"""When something that happens every so many steps or seconds is due."""

from __future__ import annotations

import time

__all__ = ["SecondOrStepTimer"]


class SecondOrStepTimer:
    """Says when something is due: every so many seconds or every so many steps.

    Args:
        every_secs: seconds between two times.
        every_steps: steps between two times. Exactly one of the two is given.

    Raises:
        ValueError: both or none are given.

    Example:
        >>> timer = ts.estimator.SecondOrStepTimer(every_steps=2)
        >>> timer.should_trigger_for_step(5)  # the first time
        True
        >>> timer.update_last_triggered_step(5)
        (None, None)
        >>> timer.should_trigger_for_step(6), timer.should_trigger_for_step(7)
        (False, True)
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if every_secs is None and every_steps is None:
            raise ValueError("Either every_secs or every_steps should be provided.")
        if every_secs is not None and every_steps is not None:
            raise ValueError(
                f"Can not provide both every_secs and every_steps. Received: {every_secs!r} and {every_steps!r}"
            )
        self._every_s = every_secs
        self._every_steps = every_steps
        self.reset()

    def reset(self) -> None:
        """Forget the last time, so that the next step is due."""
        self._last_step: int | None = None
        self._last_s = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Say whether it is due.

        Args:
            step: the step that is asked for.

        Returns:
            ``True`` at the first step, never twice for one step.
        """
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_s is not None:
            return time.monotonic() >= self._last_s + self._every_s
        return step >= self._last_step + (self._every_steps or 0)

    def update_last_triggered_step(self, step: int) -> tuple[float, int] | tuple[None, None]:
        """Note that it was done now.

        Args:
            step: the step at which it was.

        Returns:
            Seconds and steps since the last time; two ``None`` at the first.
        """
        now = time.monotonic()
        last_step, last_s = self._last_step, self._last_s
        self._last_step, self._last_s = step, now
        return (None, None) if last_step is None else (now - last_s, step - last_step)

    def last_triggered_step(self) -> int | None:
        """Return the step of the last time, or ``None``."""
        return self._last_step
