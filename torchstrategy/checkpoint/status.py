"""What a restore says about itself, now: objects may be attached after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchstrategy.checkpoint.restoration import Report, Restoration
from torchstrategy.checkpoint.tracked import Tracked

__all__ = ["CheckpointLoadStatus", "InitializationOnlyStatus"]


class CheckpointLoadStatus:
    """Which values a restore matched, as of now.

    Args:
        restoration: the restore.
        track: returns the objects of the checkpoint by their names.
    """

    def __init__(self, restoration: Restoration, track: Callable[[], Mapping[str, Tracked]]) -> None:
        self.path = restoration.path
        self._restoration = restoration
        self._track = track

    @property
    def matched(self) -> tuple[str, ...]:
        """Names of the values that were restored."""
        return self._report().matched

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the objects' values that the checkpoint lacks."""
        return self._report().missing

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the checkpoint's values that no object has; those that wait for an object are among them."""
        return self._report().unused

    def __repr__(self) -> str:
        report = self._report()
        counts = f"matched={len(report.matched)}, missing={len(report.missing)}, unused={len(report.unused)}"
        return f"{type(self).__name__}({counts})"

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Check that the objects and the checkpoint hold the same values.

        Raises:
            ValueError: they do not.
        """
        self.assert_existing_objects_matched()
        unused = self.unused
        if unused:
            raise ValueError(
                f"The checkpoint {self.path} holds values that no object has: {_names(unused)}. Attach objects under "
                "these names, or call expect_partial() instead."
            )
        return self

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Check that the objects got all their values from the checkpoint. It may hold more.

        Raises:
            ValueError: they did not.
        """
        report = self._report()
        if report.added_in_place:
            raise ValueError(
                f"The checkpoint {self.path} holds values for {_names(report.added_in_place)}, which came into a list "
                "or dict after the restore, where that is not noticed. Assign the list or dict to the checkpoint again."
            )
        if report.missing:
            raise ValueError(
                f"The checkpoint {self.path} lacks values of the objects, which stay as they were: "
                f"{_names(report.missing)}."
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Check that anything was restored.

        Raises:
            ValueError: nothing was.
        """
        report = self._report()
        if not report.matched:
            raise ValueError(
                f"Nothing in the checkpoint {self.path} matches an object. It holds {_names(report.unused)}; the "
                f"objects are {_names(report.missing)}."
            )
        return self

    def expect_partial(self) -> CheckpointLoadStatus:
        """Say to the reader that a partial match is meant; checks nothing."""
        return self

    def _report(self) -> Report:
        return self._restoration.report(self._track())


class InitializationOnlyStatus(CheckpointLoadStatus):
    """The status of ``restore(None)``: nothing was restored, and only ``expect_partial`` is content with that."""

    def __init__(self) -> None:
        super().__init__(Restoration("None", {}), dict)

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Raise."""
        raise ValueError(_NO_PATH)

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Raise."""
        raise ValueError(_NO_PATH)

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Raise."""
        raise ValueError(_NO_PATH)


_NO_PATH = "No checkpoint was given (save_path=None); nothing was restored."


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10]) or "nothing"
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown
