"""The ``torchstrategy`` command: ``doctor`` explains what a job would see, ``launch`` starts its processes."""

from torchstrategy.cli.command import main

__all__ = ["main"]
