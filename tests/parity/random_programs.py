"""Training programs made from random numbers, as data: ``random_training`` runs them on any strategy."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Layers that a program's model may have besides those that all have.
LAYERS = ("tied", "sparse", "sometimes", "at_times", "frozen", "late", "buffers")
#: How a batch's gradients are computed.
BACKWARDS = ("plain", "none", "twice", "by parts", "by chunks", "unless empty", "penalty", "assigned", "checkpoint",
             "reentrant", "create_graph")  # fmt: skip
#: What is done to gradients before a step.
EDITS = ("nothing", "scaled", "scaled past torch", "replaced", "dropped", "summed", "norm clipped", "values clipped",
         "clipped locally")  # fmt: skip
#: When and how gradients are cleared.
ZEROING = ("before", "after", "after, to zeros")
OPTIMIZERS = ("SGD", "AdamW", "RMSprop")


@dataclass(frozen=True)
class Batch:
    """What is done with one batch.

    Args:
        backward: how its gradients are computed, of ``BACKWARDS``.
        steps: the optimizers that step then, in this order.
        edit: what is done to their gradients before, of ``EDITS``.
        uses: whether the layer ``at_times`` is used.
        trains: whether the layer ``frozen`` is trained.
        evaluates: whether the model is called once more, without gradients.
    """

    backward: str
    steps: tuple[int, ...]
    edit: str
    uses: bool
    trains: bool
    evaluates: bool


@dataclass(frozen=True)
class RandomProgram:
    """A training program.

    Args:
        seed: makes the initial values and the data.
        num_examples: in the data set.
        batch_size: of the global batches, the last of which is short.
        layers: of ``LAYERS``.
        optimizers: the kind of each.
        zeroing: of ``ZEROING``.
        scaled: whether a ``GradScaler`` is used.
        overflow: the example whose gradient overflows, or ``None``.
        freezes_inside: whether layers are frozen in the replica function.
        late_at: number of the batch before which an optimizer gets the layer ``late``.
        decays: whether a schedule changes the first optimizer's rate.
        batches: what is done with each.
    """

    seed: int
    num_examples: int
    batch_size: int
    layers: frozenset[str]
    optimizers: tuple[str, ...]
    zeroing: str
    scaled: bool
    overflow: int | None
    freezes_inside: bool
    late_at: int
    decays: bool
    batches: tuple[Batch, ...]

    @property
    def clips_locally(self) -> bool:
        """Whether it depends on the number of replicas: clipping a part is not clipping the sum."""
        return any(batch.edit == "clipped locally" for batch in self.batches)

    @property
    def features(self) -> set[str]:
        """What is special about it, for a look at what programs cover."""
        found = {*self.layers, *self.optimizers, self.zeroing}
        found |= {feature for batch in self.batches for feature in (batch.backward, batch.edit)}
        found |= {f"{len(self.optimizers)} optimizers"}
        flags = {"scaled": self.scaled, "overflow": self.overflow is not None, "decays": self.decays}
        flags |= {"freezes inside": self.freezes_inside, "evaluates": any(batch.evaluates for batch in self.batches)}
        return found | {name for name, is_set in flags.items() if is_set}


def make_program(seed: int) -> RandomProgram:
    """Return the program of a seed."""
    draw = random.Random(seed)
    scaled = draw.random() < 0.3
    num_batches = draw.randint(10, 20)
    layers = frozenset(layer for layer in LAYERS if draw.random() < 0.4)
    optimizers = tuple(draw.choice(OPTIMIZERS) for _ in range(draw.choice([1, 1, 2])))
    num_examples = draw.randint(5, 20)
    # Most programs do the same in each batch, apart from a few: that is what a fast path must foresee and survive.
    usual = draw.choice(BACKWARDS[2:]) if draw.random() < 0.5 else "plain"
    usual_edit = draw.choice(["nothing", "nothing", *EDITS])
    change = draw.choice([0.0, 0.1, 0.4])
    chances = draw.choice([0.1, 0.5, 1.0]), draw.choice([0.1, 0.6, 0.9]), 0.1
    windows = _draw_windows(draw, num_batches, 2 + ("sparse" in layers), together=scaled)
    batches = []
    for steps in windows:
        backward = draw.choice(BACKWARDS) if draw.random() < change else usual
        edit = draw.choice(EDITS[:-1]) if draw.random() < change else usual_edit
        # GradScaler wants gradients at each step, and clips what is unscaled.
        backward = "plain" if scaled and backward == "none" else backward
        edit = "nothing" if scaled and edit == "clipped locally" else edit
        flags = [draw.random() < chance for chance in chances]
        batches.append(Batch(backward, steps, edit, *flags))
    return RandomProgram(
        seed=seed,
        num_examples=num_examples,
        batch_size=draw.randint(1, min(7, num_examples)),
        layers=layers,
        optimizers=optimizers,
        zeroing=draw.choice(ZEROING),
        scaled=scaled,
        overflow=draw.randrange(num_examples) if scaled and draw.random() < 0.7 else None,
        freezes_inside=draw.random() < 0.5,
        late_at=draw.randrange(num_batches),
        decays=draw.random() < 0.3,
        batches=tuple(batches),
    )


def _draw_windows(
    draw: random.Random, num_batches: int, num_optimizers: int, *, together: bool
) -> list[tuple[int, ...]]:
    """Return the optimizers that step after each batch."""
    irregular = draw.random() < 0.3
    periods = [draw.choice([1, 1, 2, 3]) for _ in range(num_optimizers)]
    if together:
        periods = periods[:1] * num_optimizers
    order = draw.sample(range(num_optimizers), num_optimizers)
    windows = []
    for i in range(num_batches):
        is_due = draw.random() < 0.6
        due = [is_due if together else draw.random() < 0.6 for _ in order]
        if not irregular:
            due = [i % period == period - 1 for period in periods]
        windows.append(tuple(k for k in order if due[k]))
    return windows
