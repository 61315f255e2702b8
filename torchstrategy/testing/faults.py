"""What can go wrong on one rank of a job, for tests of what the others then do."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Literal, NamedTuple

__all__ = ["Fault"]


class Fault(NamedTuple):
    """Something that goes wrong on one rank at one step; can be pickled.

    Args:
        kind: ``"kill"`` ends the process at once, as the system does when memory runs out (SIGKILL); ``"stop"`` halts
            it (SIGSTOP); ``"hang"`` lets the calling thread wait for ever; ``"exit"`` ends the program in the regular
            way; ``"error"`` raises ``OSError("injected")``.
        rank: where.
        step: when.

    Example:
        >>> from torchstrategy.testing.faults import Fault
        >>> fault = Fault("error", rank=1, step=3)
        >>> fault.strike(rank=0, step=3)
        >>> fault.strike(rank=1, step=3)
        Traceback (most recent call last):
        ...
        OSError: injected
    """

    kind: Literal["kill", "stop", "hang", "exit", "error"]
    rank: int
    step: int

    def strike(self, rank: int, step: int) -> None:
        """Let it happen if it is this rank's turn; a training loop calls this at each step.

        Args:
            rank: the calling process's id.
            step: number of the step.

        Raises:
            OSError: the fault is an error.
            SystemExit: the fault is an exit.
        """
        if (rank, step) != (self.rank, self.step):
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "hang":
            threading.Event().wait()
        elif self.kind == "exit":
            sys.exit(0)
        else:
            raise OSError("injected")
