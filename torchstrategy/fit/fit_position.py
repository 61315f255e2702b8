"""How far a call of ``fit`` is: what a rerun needs, beside the model, to go on where it was interrupted."""

from __future__ import annotations

from typing import Any

from torchstrategy import errors

__all__ = ["FitPosition"]


class FitPosition:
    """Where ``fit`` is. Anything with ``state_dict`` can be saved by ``ts.train.Checkpoint``, and so can this.

    Args:
        epoch: the epoch that is running, from 0.
        step: batches done in it.
        iterations: optimizer steps that the model has made since it was compiled.
        seed: what the random numbers of ``fit`` derive from; ``None`` until a callback draws one.
        program: what must be the same in a rerun, such as the number of batches.
    """

    def __init__(
        self,
        epoch: int = 0,
        step: int = 0,
        iterations: int = 0,
        seed: int | None = None,
        program: dict[str, Any] | None = None,
    ) -> None:
        self.epoch = epoch
        self.step = step
        self.iterations = iterations
        self.seed = seed
        self.program = {} if program is None else program
        #: Whether the epoch's last batches are done, after which its data was at its end.
        self.is_at_end = False
        #: Names of the metrics that logs show, once a step was made.
        self.shown: list[str] | None = None
        #: The callbacks of the running ``fit``, whose states belong to the position.
        self.callbacks: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the callbacks' states as plain data."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "iterations": self.iterations,
            "seed": self.seed,
            "program": dict(self.program),
            "is_at_end": self.is_at_end,
            "shown": self.shown,
            "callbacks": {} if self.callbacks is None else self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved position.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            InvalidArgumentError: it was saved by a ``fit`` with other arguments, so the rest of it can't be repeated.
        """
        different = [
            f"{name}: {state['program'].get(name)!r} then, {self.program.get(name)!r} now"
            for name in sorted({*state["program"], *self.program})
            if state["program"].get(name) != self.program.get(name)
        ]
        if different:
            raise errors.InvalidArgumentError(
                "The interrupted fit was called with other arguments, so it can't be continued exactly. Different are "
                f"{'; '.join(different)}. Use the same ones, or start anew with another directory."
            )
        self.epoch, self.step, self.is_at_end = state["epoch"], state["step"], state["is_at_end"]
        self.iterations, self.seed, self.shown = state["iterations"], state["seed"], state["shown"]
        if self.callbacks is not None:
            self.callbacks.load_state_dict(state["callbacks"])
