"""Training by ``ts.Model``: ``compile``, ``fit``, ``evaluate``, ``predict``, and saving.

``ts.Model`` is a module, so a scope records it like any other, and a ``train_step`` of the user's runs with ``self``
being the replica's own model. What ``compile`` makes (optimizer, metrics, loss) is not part of the module but of a
``Trainer`` beside it: an object that copies for replicas share, and that every other copy and every pickle leaves
behind uncompiled. The trainer holds the program's own objects, which stand for the current replica's inside ``run``.
(Metrics as submodules of the model would be in its ``state_dict``, and an optimizer as its attribute would be copied
and pickled with it.)

A batch of ``fit`` is a batch of a distributed dataset, under the default strategy too, so that it always says how it
was split. The compiled loss takes each loss apart into the losses of examples, and divides their sum by what the
global batch has: a count, which is known without communication, or what labels and weights say (``ignore_index``,
class weights, ``mean_with_sample_weight``), which is a sum over replicas. Between processes its terms are sent before
the forward pass and read after it (``WorkerGroup.start_sum_of_numbers``): they travel while the ranks compute. Any
collective that comes first reads them, because messages arrive in the order in which they are sent. A loss that can't
be taken apart is refused with one replica as well, because the program would mean something else with two.

**Windows.** With ``gradient_accumulation_steps=k``, the tags of ``k`` batches name the examples of all of them
(``window``), and ``"actual"`` divides by that, in the user's own steps too. So a window is exactly one step on one
large batch, also if its batches differ in size or the epoch ends within it. Keras averages the batches' gradients,
which is not that step for a partial batch, and carries a rest over to the next epoch. ``minimize(loss)`` knows
whether the step is complete; stepping by hand within a window is refused.

**Logs.** The loss is tracked as the sum over replicas of (share of the batch's mean x examples of the batch), and
divided by the examples: the mean over examples for every tail. Nothing is read from a device until somebody looks.
Batch hooks get a mapping that computes itself when it is read. Between processes reading is a collective, which a
callback on the chief only would hang in; so there the metrics are synchronised at points that all ranks reach (the
first batch, then every ``log_interval``), and the mapping holds the numbers of the last one. A decision to stop is
agreed at the end of the epoch, for the same reason. Every process calls all callbacks with equal logs.

**One place for what goes wrong first.** Shapes, dtypes and ranges of labels and predictions are looked at in the
first batch of a call only, where waiting for the device costs nothing that matters; the messages name the argument of
``fit``.

**Positions.** ``FitPosition`` holds the epoch, the batches done in it, and the callbacks' states; with the dataset's
own position, the metrics and the model it is what ``BackupAndRestore`` saves. Random numbers begin anew at each save,
from a seed that derives from the position, in an unbroken run just the same: so no generator's state is saved, and a
rerun may have another number of replicas.

**On parameter servers** the loop is the same but for ``run_steps``. One function object for each compiled model is
sent to the workers once: the trainer's parts, with references to the optimizer and metrics that each worker has of
its own; batches are arguments. Results are taken in order, some way behind what is scheduled, so that callbacks see
batch after batch. Metrics merge once for each accepted result, so a step that ran twice counts once. Metrics that
only the first batch can make (one for each output) are made by the coordinator, which asks a worker for the outputs
of one batch first. Before a callback saves, the loop stops scheduling and waits (``saves_after``), so position, data
and weights belong together.
"""
