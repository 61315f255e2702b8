"""The parts of a batch: ``x``, ``y`` and ``sample_weight``, as Keras packs and unpacks them."""

from __future__ import annotations

from typing import Any

from torchstrategy.base import tree
from torchstrategy.base.values import get_shares
from torchstrategy.fit.arguments import DataArguments

__all__ = ["check_first_batch", "pack_x_y_sample_weight", "unpack_x_y_sample_weight"]


def unpack_x_y_sample_weight(data: Any) -> tuple[Any, Any, Any]:
    """Return the parts of a batch, as a ``train_step`` of your own gets it.

    A tuple or a list, such as a ``DataLoader`` gives, holds up to three parts. Anything else is ``x`` alone; so a model
    with several inputs gets them as a tuple *in* the tuple, ``((x1, x2), y)``, or in a dict.

    Args:
        data: a batch.

    Returns:
        ``(x, y, sample_weight)``, with ``None`` for what the batch doesn't hold.

    Raises:
        ValueError: the batch is a tuple or list of no or more than three parts.

    Example:
        >>> ts.utils.unpack_x_y_sample_weight(["x", "y"])
        ('x', 'y', None)
        >>> ts.utils.unpack_x_y_sample_weight({"image": "x"})
        ({'image': 'x'}, None, None)
    """
    if not isinstance(data, (tuple, list)):
        return data, None, None
    if not 1 <= len(data) <= 3:
        raise ValueError(
            "A batch must be x, (x,), (x, y) or (x, y, sample_weight); several inputs or outputs go into a tuple or "
            f"dict of their own, such as ((x1, x2), y). Received a {type(data).__name__} of {len(data)} parts."
        )
    x, y, sample_weight = (*data, None, None)[:3]
    return x, y, sample_weight


def pack_x_y_sample_weight(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Return a batch of its parts: what ``unpack_x_y_sample_weight`` takes apart.

    Args:
        x: the inputs.
        y: the targets, or ``None``.
        sample_weight: the weights of the examples, or ``None``.

    Returns:
        A tuple without the trailing parts that are ``None``; ``x`` itself if it is alone and no tuple or list.

    Example:
        >>> ts.utils.pack_x_y_sample_weight("x")
        'x'
        >>> ts.utils.pack_x_y_sample_weight(("x1", "x2"))
        (('x1', 'x2'),)
        >>> ts.utils.pack_x_y_sample_weight("x", "y")
        ('x', 'y')
    """
    if sample_weight is not None:
        return x, y, sample_weight
    if y is not None:
        return x, y
    return (x,) if isinstance(x, (tuple, list)) else x


def check_first_batch(element: Any, names: DataArguments) -> None:
    """Check that an element is a batch; in cross-replica context.

    Args:
        element: of a distributed dataset.
        names: of the method's arguments.

    Raises:
        ValueError: it has other parts than ``(x, y, sample_weight)``, or ``x`` or ``y`` have no batch dimension.
    """
    try:
        parts = unpack_x_y_sample_weight(element)
    except ValueError as error:
        raise ValueError(f"{names.x} gives something else than batches: {error}") from None
    for name, part in zip(("x", "y"), parts, strict=False):
        leaves = [(path, leaf) for path, leaf in tree.leaf_paths(part) if leaf is not None]
        if leaves and all(get_shares(leaf) is None for _, leaf in leaves):
            path, leaf = leaves[0]
            raise ValueError(
                f"{names.x} must give batches, but in the first one the {name}{path} has no batch dimension: "
                f"{leaf!r:.80}. If it gives single examples, batch them: ts.data.Dataset.batch(32), "
                f"DataLoader(..., batch_size=32), or {names.batch_size.replace('...', '32')} for a torch Dataset or "
                "another dataset without batches."
            )
