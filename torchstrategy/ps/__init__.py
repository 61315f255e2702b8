"""Variables and optimizers that live on parameter servers.

The *coordinator* runs the user's program; workers and parameter servers run ``ts.Server``, which knows nothing of it.
The coordinator connects to all of them, and every worker to every parameter server; nobody connects to the
coordinator. Servers survive coordinators. Of two coordinators the one that began later goes on: every message belongs
to a session, every session to a coordinator's *incarnation*, and servers refuse those of an older one.

**One object, three forms.** When a scope closes, the parameters and buffers of its modules are put on the servers.

- On the *coordinator* the tensor in the program's hands changes its class and gives up its memory. In a torch
  function a local leaf takes its place, pulled before if the servers have a newer version; what a function writes to
  it is assigned to the variable. A change of class keeps the identity that optimizers and the program's own
  references rely on, and whoever reads a value sees the present one. A call of a module pulls all of its values with
  one request.
- On a *worker* modules hold plain parameters, whose memory is replaced by what is pulled when a function starts.
  Forward passes run at full speed, and recurrent modules and compilers see nothing unusual. After a step the
  optimizer's parameters change their class until they are used, and pull themselves then. A backward pass never mixes
  versions: a pull moves the version counter that autograd checks.
- The weight of an embedding with ``sparse=True``, and a sharded variable, are never pulled for a look-up: it asks for
  the rows that it needs, and its gradient is sparse.

``optimizer.step()`` becomes a push. The servers have an optimizer of the same class over their parts of the
parameters, so any torch optimizer works that treats elements alike; whether one does is tried out once with small
tensors, instead of keeping a list. What a parameter server holds is ordinary torch, and numbers equal those of a
local optimizer that is fed the same gradients in the same order. A push carries the hyper-parameters of when its
function was scheduled, so that a scheduler's step does not change what waits in the queue.

**What is sent of a program.** Functions are pickled by cloudpickle with references: a parameter, a recorded object, a
dataset of the worker and the strategy itself are names in it. Recorded objects are *definitions* of their own, sent
once to each worker, with a version for each state that matters there, such as the training mode. Modules of the
user's that are not installed packages travel by value, because a worker need not have the program's files. Results,
errors and tensors come back as JSON and raw bytes, never as pickles: a worker can't run code in the coordinator.
Metrics gather on the worker what one function added, and the coordinator merges it when it accepts the result:
exactly once, also where a function ran twice.

**At least once.** The coordinator gives each worker the next function when one has ended, from the one thread that
also reads all control connections. A lost worker's functions go back to the front of the queue. A worker that comes
back is given its definitions, datasets and iterators anew. A parameter server can't be replaced: its variables are
gone, so ``schedule`` and ``join`` raise, and the program restores a checkpoint. Checkpoints hold whole variables,
read and written piece by piece through files without a name, so that a model larger than the coordinator's memory can
be saved, and restored into any number of parts, or without servers.

**Staleness.** With ``max_staleness=s`` no function starts while one that started more than ``s`` functions before is
still running. The coordinator alone decides that, where it hands out functions; the alternative, versions that the
servers refuse, would repeat work and its side effects. With 0 the run is the one of a single process, and is tested
as such.

**Without a coordinator** every process runs the program, so there is nobody to hand out numbers: variables are
numbered by the order of their creation, which is the same everywhere, and the chief's list is what the others compare
theirs with. A training has a number. The chief begins one, which drops what the servers had, and publishes the list
when its values count, that is, after a restore; connections of an earlier training are refused by the servers, and a
worker that is refused attaches itself anew. So a chief's restart needs no message to the workers. Processes compute
with plain parameters, one set for each replica, which are pulled before each run: that costs traffic, but modules,
hooks and compilers see nothing unusual, and replicas in one process work as under any strategy. (Sending functions to
workers, as the coordinator does, would not run programs that have loops of their own.)
"""
