"""``ts.tpu``, what tf has under ``tf.tpu``, and ``TPUStrategy``.

Several replicas in one program that XLA compiles for several devices: the replica function is traced once.

On a TPU what counts is that a step is one program, compiled once. TPUs (docs/tpu.md) says how that is used; here is
why it is made so.

**One trace for all replicas.** Torch_xla notes operations and compiles them when the graph is cut. Calling the
replica function once for each of eight replicas would note, hash and look up eight copies of the same operations in
every step. So the function is called once, and XLA's partitioner (SPMD) makes one program for all devices.
``replicas/`` is not used: there is one copy of the model, one thread, and a ``Placement`` with ``replicas_per_copy``.

**Manual sharding.** Left to itself, the partitioner computes what the program says on the global batch: batch
normalisation would see all examples, a loss would be the global mean, and ``all_reduce`` would have no meaning. So
inputs enter a region of manual sharding, in which every tensor has one replica's shape. Two kinds of values are in
there. *Local* ones differ between replicas, *shared* ones, such as parameters and summed gradients, don't. A
replica's values leave by ``stack``, as rows of one tensor ``[n, ...]`` split over the devices; a sum over replicas is
a sum over the rows, which XLA makes an all-reduce.

A dispatch mode, the ``Region``, watches the function. A value is local if an operation has a local argument. If it
has shared ones as well, these are entered first, each explicitly and once for a run: XLA's partitioner ends the
process on an operation with arguments of both kinds, with a failed check and no message about the program. The mode
is the hot path of a step and costs some microseconds for each operation. Torch functions and views arrive there as
pure functions, so following the flow of data is enough.

**Groups instead of padding.** With shares of 3, 3, 3 and 1 the replicas need different shapes, which one program has
not. The alternative was to pad the shares to one size and to give the padding weight 0. That is exact for losses that
know of the weights, and for nothing else: the statistics of batch normalisation, a hand-written loss, a metric, a sum
over the batch in the user's function would see examples that do not exist. So replicas of equal shapes form a group,
the function is traced for each group, and where the replicas meet, and at the end, each replica's value is selected
from its group's. There are three groups at most, because chunks are full, shorter or empty. Groups take turns as
replicas in one process do, with the same runner. What a group changes in place (parameters, gradients, buffers) is
put back before the next one is traced, and joined at the end (``turns.py``). A parameter is put back by the plain
tensor that it wrapped, for plain tensors are values of the graph: nothing is copied unless something was written, and
a write shows as another plain tensor, whichever way it was made. An optimizer's step is the first group's, and what
that makes of the parameters is given to all. Of what groups write to a parameter by themselves the first group's
counts, and all are compared on the devices, because they were computed from the same numbers unless they followed the
share's size. Hosts that drive their devices together would each have to trace groups of which they have no member;
they refuse uneven shares (``groups.py``).

**State as rows.** What replicas keep from one run to the next and where they may differ (local gradients, buffers,
metric states) is held as ``[n, ...]``. Outside ``run`` the tensor shows replica 0's value; inside, it is entered
again. What a run has read only gets its old rows back, so that evaluation copies nothing. Results of ``run`` are such
rows, too: a ``PerReplica`` that stays on the devices, and whose ``values`` are copies on the host, because slicing a
split tensor on the device would be one more program for each reader.

**Gradients are summed at the step, inside the graph**, as everywhere: one sum over the rows of each gradient, and a
parameter that no replica has a gradient for keeps ``None``. Step counters of optimizers stay on the host, because an
optimizer that reads its step as a tensor would read it in every step.

**Modules are made on the host**, under plain torch, and moved at the first run with the tensors' implementations
swapped, so that parameters stay the objects that optimizers and the program hold. Initial values are then those of
the other strategies, and making a model compiles nothing.

**Random numbers** are drawn for all replicas at once, and each replica gets its part: in one trace every device would
draw the same ones. The seed comes from the program's stream of the host in each run.

**Refusals.** A number that is asked for within the trace would cut the step's graph inside the region, and XLA ends
the process there. So ``.item()``, printing, copies to the host, data-dependent shapes, foreign collectives and
operations that torch_xla computes on the host raise before, with the place and the way out, and so does a local
tensor that outlives ``run``. After any error every living local tensor is given a shared value, because the next
transfer would end the process otherwise. Where torch_xla computes other numbers than torch (running variance of batch
normalisation) they are corrected.

**Where graphs are cut.** After the outermost ``ts.function``, else after each ``run``. Cutting inside ``run``, or
whenever something is read, would make the number of programs depend on what the user prints.

**One process for each device** is the path of all other strategies with one replica in a process: a ``WorkerGroup``
with its control plane and its records, and XLA as the backend. Every collective is a program of its own: sync,
agree, sum, sync. In a step's graph it would be faster, but torch_xla demands the same program on all processes that
take part, and a graph differs as soon as shares are uneven, integer buffers take rank 0's value, or a function looks
at its rank. It offers no hash of a pending graph by which ranks could compare. A rank that fails or reads a number
between trace and cut then can't leave the others waiting on a device, because no collective is ever pending.

**The adapter.** ``xla/interface.py`` has what a backend must do, in some two dozen short members. Strategies know
nothing of torch_xla's modules, and everything that must precede the first tensor or the first backward pass is one
call, ``start``: choosing SPMD, the compilation cache, and touching the devices, since autograd counts devices once,
at its first backward pass.

**Measured** on four virtual devices with torch_xla 2.9: a conv net, a net with batch normalisation and a small
transformer have the weights of CPU replicas after 20 steps, partial batches and accumulation included; loops of
constant shapes compile twice, and once more for a partial batch. What a step costs over data parallelism written by
hand is in Performance (docs/performance.md). Tracing is what it can cost, and where the time went was not where one
would look: half of it to torch_xla's own wrappers of sharding annotations, which the adapter makes itself now. Half
of the rest went to the default device: ``torch.device`` is a function mode, so that torch calls Python for every look
at a tensor, even at its shape. Inside an optimizer's step there is none, and operations that the region has seen go
to XLA's kernels past it. Optimizers call their ``foreach`` functions, one operation for all parameters, which XLA
sees as one for each: the same numbers in half of the time, unless the program says ``foreach=False``. And a code
object is hashed anew at each look into a dictionary, so the search for the user's line goes by file names.

Launching waits for nothing, and torch_xla lets the host be one program ahead: with steps of 430 ms, a ``run`` with a
batch of 8 MB returned 12 ms after its call while the step before computed, so copying a batch to the devices is
hidden.

**What no mode sees.** Torch_xla registers ``einsum`` and ``max_pool3d`` with gradient functions of their own that
call no operation; a result would not be known as local, which ends the process in XLA's partitioner. At the start of
the runtime torch's own take their places. So does torch's ``nn.GRU``, which torch_xla replaces by a class of its own
when it is imported: a model made there could not be loaded where torch_xla is missing. Looking rows up by an index
that is one of several results of an operation (``sort``, ``topk``, ``max``) also ends it, so such indices are
computed anew, as times 1.

**Empty shares.** XLA fails on some operations without elements, such as views by strides, which recurrent layers and
``glu`` make. A group of replicas without examples has a region of its own: what has no elements is not computed, only
its shape is found, by torch's own rules for tensors without memory. What has elements, such as gradients of weights,
is computed as everywhere.
"""

from torchstrategy.tpu import experimental

__all__ = ["experimental"]
