"""Hosting replicas: what a scope records, one copy of it for each replica of the process, and their threads.

What `scope()` does
-------------------
It makes the strategy current, makes its first device torch's default device, and records every module, optimizer,
learning-rate scheduler and ``GradScaler`` that is constructed meanwhile. Recording wraps the constructors of these
base classes while a scope is open. Those of optimizers and schedulers stay wrapped while there is a strategy with
several replicas that had a scope: one that is made outside the scope, for what was made inside, is taken up at the
next ``run``, because the replicas would share a plain one and count its steps once each. With several processes,
initial values come from the chief. A ``torch.Generator`` is a C type whose constructor can't be wrapped and whose
class can't be swapped: one that is an attribute of a recorded object gets a counterpart for each replica, one that
stands alone is shared by the replicas in turn.

Replicas in one process: copies behind a facade
-----------------------------------------------
At the first ``run``, all recorded objects are deep-copied together, once for each further replica and with one shared
memo: tied weights stay tied, and a copied optimizer points at the copied parameters. The object in the user's hands
then becomes a facade by a change of its class. Inside ``run`` it stands for the current replica's object; outside,
data is that of replica 0 and methods reach all of them. The copies contain no facades, so forward passes run at full
speed and ``torch.compile`` sees plain modules. ``isinstance``, ``pickle``, ``torch.save`` and ``state_dict`` see the
plain class.

The alternative, one module whose parameters resolve to the current replica's, was rejected: it is wrong in silence
wherever a module keeps state that torch does not know as a parameter or buffer, such as the flat weights of an LSTM,
plain attributes or a metric's state.

When a ``run`` starts, tensors and hyper-parameters that the program changed since the last one are copied from
replica 0 to the others.

**Variables.** A ``ts.Variable`` is a tensor, whose class can't be swapped and which has no attributes of its own to
swap. So it stands beside its copies: a tensor subclass whose ``__torch_function__`` puts the current replica's copy
in its place. The copies are plain tensors that the replicas' modules and optimizers hold, so what they compute pays
nothing; a facade that is asked outside ``run`` gives the variable back for its copy. In a process with one replica
the variable is its own copy. Assigning with an aggregation is a merge point; a variable that was assigned without one
is left out of the search for divergence. tf creates its variables on every replica at once and so are these, unlike
modules, because ``print(variable)`` shows every copy at once. Processes take the chief's initial value where a
variable is made, and again at the first ``run`` with all other initial values, because layers fill variables in
place.

**Turn-taking.** Replica 0 runs on the caller's thread; each other one has a thread that lives as long as the
strategy, and is used when the replicas meet: waking a thread on another core costs tens of microseconds, so replicas
that never meet run one after another on the caller's thread, where a debugger finds them. One replica runs at a time,
and the turn passes at merge points. The order of side effects is that of tf, and each replica's CPU random stream is
reproducible, because the generator's state is swapped with the turn.

**At once.** With ``concurrent=True`` the others' threads run at the same time as replica 0 on the caller's thread,
each with its share of the cores. Replica 0 has torch's default generator of the CPU, the others have generators of
their own, with the streams that they have in turns: on their threads a dispatch key is switched on, on which the
operators that take a generator have kernels that pass the thread's (``random.py``). torch offers no
default generator for each thread; a function mode would not see what torch draws by itself, and would make each
attribute of a tensor slower, and a lock around drawing would not keep two streams apart. The process keeps memory
that it frees, because the kernel gives it out, and takes it back, for one thread at a time: with glibc's defaults
that made steps of the conv net 15 % longer. Where replicas meet, the caller's thread goes on with its share of the
cores, unless the model has over 32 MiB: OpenMP's threads go on looking for work for milliseconds after they had some.

**Sums inside a process** are made in the gradients' own memory by multi-tensor operations: added to replica 0's, then
copied to the others'. A gradient that may have other uses (a graph, memory that it shares with another one or that
the program has put there) gets a new tensor, as all do with cross-device operations other than the default one's.

**One meeting point.** ``merge_call`` is the only way in which replicas wait for each other: all stop, and one
function runs in cross-replica context. Collectives and the gradient sum are built on it. A replica that raises
releases the others, and ``run`` raises the first real error, naming the replica and its device.

**Silent divergence is looked for.** In the first runs, and from time to time, no replica's turn may have changed
another replica's tensors, and the copies' checksums must agree. The error names the tensor.
"""
