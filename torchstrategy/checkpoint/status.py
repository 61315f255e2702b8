"""What a restore says about itself."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CheckpointLoadStatus", "InitializationOnlyStatus"]


class CheckpointLoadStatus:
    """Which values a restore matched.

    Args:
        path: the checkpoint.
        matched: names of the values that were restored.
        missing: names of the objects' values that the checkpoint lacks.
        unused: names of the checkpoint's values that no object has.
    """

    def __init__(self, path: str, matched: Sequence[str], missing: Sequence[str], unused: Sequence[str]) -> None:
        self.path = path
        self.matched = tuple(matched)
        self.missing = tuple(missing)
        self.unused = tuple(unused)

    def __repr__(self) -> str:
        counts = f"matched={len(self.matched)}, missing={len(self.missing)}, unused={len(self.unused)}"
        return f"{type(self).__name__}({counts})"

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Check that the objects and the checkpoint hold the same values.

        Raises:
            ValueError: they do not.
        """
        self.assert_existing_objects_matched()
        if self.unused:
            raise ValueError(f"The checkpoint {self.path} holds values that no object has: {_names(self.unused)}.")
        return self

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Check that the checkpoint held every value of the objects.

        Raises:
            ValueError: it did not.
        """
        self._require_checkpoint()
        if self.missing:
            raise ValueError(
                f"The checkpoint {self.path} lacks values of the objects, which stay as they were: "
                f"{_names(self.missing)}."
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Check that anything was restored.

        Raises:
            ValueError: nothing was.
        """
        self._require_checkpoint()
        if not self.matched:
            raise ValueError(
                f"Nothing in the checkpoint {self.path} matches an object. It holds {_names(self.unused)}; the objects "
                f"are {_names(self.missing)}."
            )
        return self

    def expect_partial(self) -> CheckpointLoadStatus:
        """Say to the reader that a partial match is meant; checks nothing."""
        return self

    def _require_checkpoint(self) -> None:
        pass


class InitializationOnlyStatus(CheckpointLoadStatus):
    """The status of ``restore(None)``: nothing was restored, and only ``expect_partial`` is content with that."""

    def __init__(self) -> None:
        super().__init__("None", (), (), ())

    def _require_checkpoint(self) -> None:
        raise ValueError("No checkpoint was given (save_path=None); nothing was restored.")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10]) or "nothing"
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown
