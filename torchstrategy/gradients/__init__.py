"""How the gradients of all replicas become their sum, and buffers their average.

Each replica computes the gradients of its part of the loss, and the **sum** over replicas is applied: tf.distribute's
rule. ``p.grad`` stays local until ``optimizer.step()`` in replica context, where an optimizer hook sums it: between
the processes of one host in the gradients' own memory, of which chunks of 512 KiB pass through the memory that the
processes share (``collectives/summing.py``), and over a network in buckets.

Why at the step, and not during ``backward()`` as DDP does by default: local accumulation, unused parameters, a rank
without a backward, frozen parameters and ``torch.autograd.grad`` are then right without special cases. Why the sum:
together with losses divided by the *global* batch size it is exact for shares of any size, while an average over
replicas is exact for equal shares only.

- A parameter without a gradient on every replica keeps ``grad is None``; a zero would make some optimizers decay it.
  Which gradients each process has (dense, sparse, already summed) goes as bit masks into the record that comes before
  the data.
- ``GradScaler``: the sum is made when gradients are unscaled, so an overflow on one rank is an overflow on all.
- ``ReplicaContext.sum_gradients(optimizer)`` sums now; ``step()`` sums only what is not a sum yet. Which gradient is
  what stands in one ledger of the strategy (``gradients/ledger.py``), never on the program's tensors: for each
  parameter which tensor its gradient was, with which version, and what ``backward``, sums, steps and clearing did
  since. From a strategy's first look at its parameters on the one function by which torch's ``backward`` and ``grad``
  reach the engine is watched, so that names which the program took before are seen too, and the two ``zero_grad``s
  (``gradients/hooks.py``). Which gradients a pass has reached a hook of each parameter says: the ``append`` of a queue,
  in C, for a call of Python amid torch's own costs a gradient more than all the rest; the queue is looked at when the
  pass returns, or before anything else is asked. A gradient is local, summed or applied. What the program has replaced,
  or rewritten past the version counter, is compared by fingerprints of its bits: a sum is equal on all replicas, so
  gradients that differ are local. What is equal everywhere and may still be both is refused, with
  ``sum_gradients(optimizer, fresh=True)`` and ``mark_summed(optimizer)`` as the ways out. Clipping between ``backward``
  and the sum is seen by the version; it is tf's rule, but rarely meant.
- In an optimizer's first steps the scalar that is differentiated, by ``backward`` or by a ``grad`` whose results the
  program assigns, is looked at (``gradients/mean_losses.py``): if its graph ends in a mean and nothing on the way or
  in the run scaled it by a count, a warning says that means are added up, with the line. The graph is looked at, not
  names of losses, so a model's own mean loss is found too.
- ``step()`` of a recorded optimizer outside ``run`` raises with more than one replica: a program that forgets ``run``
  must not train unsynchronised copies.

Between processes the parameters are compared as well: the first two sums of an optimizer, and every ``check_every``-th,
exchange a fingerprint of each parameter's bits that knows the place of each element (``replicas/fingerprints.py``).
All ranks are meant to hold equal bits; only where those differ are values compared, with a tolerance. A checkpoint that
is loaded on the chief only would otherwise train on in silence; since every record tells how often the parameters were
written to and a digest of the optimizer's hyper-parameters (``replicas/divergence.py``), such a load and a rate that is
set on one rank are found at the next sum. The comparison rides on the sum because that is a point which all ranks
reach; ``run`` itself needs no communication, so a rank may run an evaluation alone. The record says which optimizer is
summed, by the order of first sums, so that ranks that step different ones are told so. Central storage compares no
hyper-parameters, since one copy steps for all; and where ranks have written unequally often 20 times without a
difference, the next comparison is that of every ``check_every``-th sum, which begins to count anew.

**Sums that begin during ``backward``** (``gradients/early.py``, ``early_buckets.py``) are a wager on top of that, on
the same buckets (``dense.py``), with one replica in a process. After a step all ranks expect the optimizer that came
next the last time, and bring its gradients in the same buckets (``early_bytes`` in ``base/devices.py``), in the order
in which they were complete on rank 0. A hook counts backward passes; when a bucket's parameters have had as many as
before their last step, its gradients are copied and the sum of the copies starts, on CPUs on backends of its own, so
that its order against the program's collectives is free. Two of NCCL's groups in a free order may wait for each other
on the GPUs. So there is one, each record tells how many early sums a rank has begun, and before another collective
takes the group all ranks begin what one of them has (``EarlySums.catch_up``). Gloo and NCCL work by themselves; shared
memory and two levels get a thread. The record at the step, which is exchanged anyway, tells how many buckets each rank
has started and which copies are stale there. All start what one has started, wait, take what is good everywhere, and
sum the rest as ever. So a wrong guess costs time and no number: accumulation, a backward that failed half-way, a rank
without one, clipping, another optimizer than the expected one need no special case. A copy is stale if its gradient is
from another backward pass than when it was copied, has another version, or, because ``p.grad.data`` has no version,
other sums of its elements times fixed random numbers (a plain sum stays as it is when a gradient whose elements add up
to 0 is scaled or clamped). Accelerators compare these sums in the first steps and in every 100th one only. After steps
with stale copies the wager pauses, twice as long each time. Optimizers are known by their parameters' identity and by
the order of their first sums, so that equal ones, as in a GAN, are told apart. The first buckets are planned at an
optimizer's second sum on every rank; there the ranks compare which gradients can travel early, which until then is
known of a rank's own devices only.

It is on where gradients travel over a network, and off in shared memory. Measured between two processes on a machine
of two cores that other programs used as well (so only ratios mean something; with overlap / without, in alternation,
medians of two rounds): shared memory 1.07 and 0.99 for the tutorial's conv net, 1.03 and 0.97 for an MLP of 21 M
parameters; gloo over the loopback 1.02 and 1.03, 0.81 and 1.02. Where the computation keeps every core busy, moving
data meanwhile gains nothing; what it hides is the time on a link. The memory it takes is what DDP takes by default:
gradients and one copy.

**Buffers** such as batch normalisation's moving averages: floating-point buffers that changed are averaged at
``optimizer.step()`` over the replicas whose share was not empty; integer buffers take replica 0's value. Reading and
saving are then local everywhere. For another rule a module registers a ``ts.Variable`` as the buffer.

They travel after the gradients, in messages of their own, and only in steps that changed some: the record says which,
so models without such buffers pay nothing. Riding in the last gradient bucket would save one small message for models
with batch normalisation, and would fix the bucket's layout before it is known which buffers changed. A module's
buffers count as changed together, because torch's batch normalisation does not move the version of its moving
averages.

**Memory formats.** A summed gradient has the strides of its parameter, because torch's fused optimizers walk through
the memory of both at once and would compute wrong numbers without a word. In a bucket its elements are in the order
in which the parameter has them in memory, so a model in ``channels_last`` pays no copies; that order is part of the
hash that ranks compare. The state of optimizers moves to the shared memory of central storage in the same way.

**SyncBatchNorm** exchanges counts, means and squared deviations, not sums and sums of squares, whose difference loses
the variance of values with a large mean. Every replica gets all rows and combines them in the same order, so all have
the same bits. Over NCCL without early sums no record comes before the rows: a hundred of them in a step made each
process wait for all others before it gave its GPU more to do. The next record has a hash of what passed since the last.
``torch.nn.SyncBatchNorm`` is served by replacing its ``forward``, once there is a strategy with several replicas: a
change of class when it is made would miss layers that are copied, unpickled or converted outside the scope, and they
would normalise by themselves without a word.

**Compression** is for what leaves a host. In 16 bits it is a backend around another one
(``collectives/compression.py``), so buckets, early sums and two levels know nothing of it. Ranks exchange parts, add
in ``float32``, and give the sums to all; adding 16-bit numbers hop by hop, as a ring does, would round once for each
rank. Buckets of every size take that backend, or a number's rounding would depend on the bucket it is in. PowerSGD sees
matrices and remembers, so it stands where gradients are still apart (``gradients/power_sgd.py``). Everything in it is
linear in the sum of the processes' matrices up to what all compute alike; therefore its result does not depend on how
the batch is divided. Its memory belongs to a parameter, not to an optimizer's layout: layers may be frozen or added.
The record holds a checksum of what each rank remembers to have summed, and ranks that differ forget together; else
one would send thin matrices where another sends whole ones. Memory changes at the end of a sum, and only if all of it
is finite: all ranks see the same sums, so a step that ``GradScaler`` skips is forgotten by all. Bases and products
are computed on each rank from the same bits, which processors of several kinds may round differently; rank 0's basis
does not travel, because the product would still differ. The guide asks for processors of one kind.
"""
