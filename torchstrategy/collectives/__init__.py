"""Collectives: between the replicas of one process and between processes.

Collectives between processes
-----------------------------
The library makes its own process groups and never takes over the program's. Gloo returns garbage for mismatched
dtypes and aborts a rank for mismatched shapes, so before data travels the ranks compare **records** of what they
bring: a sequence number, the operation, the calling line, and shapes and dtypes (``record_group.py``). If they are in
different operations, every rank raises a ``DisagreementError`` that lists them; if they bring different shapes or
dtypes, an ``InvalidArgumentError``. A sum of gradients sends one record, with a hash of the parameters' shapes in
place of the shapes, before all of its buckets. Layers that meet many times in a step (``SyncBatchNorm``) have a record
of their own only where the message brings the numbers anyway; over NCCL without early sums the next one compares
them.

Records travel over TCP connections which the calling thread itself reads and writes: a gloo collective of this size
hands over to other threads and takes several times as long. Up to 16 ranks there is one connection for each pair;
above that they are a tree, up and down which records go.

Data travels over **backends** (``backends.py``, ``shared_memory.py``), which ``routes.py`` chooses by size and
place:

- Up to 16 KiB on CPUs: in a message. A user's small tensor rides in the record itself, so its collective is one
  round.
- Larger, on one host: shared memory without a name (``memfd_create``), whose descriptor travels over a Unix socket.
  It is gone with the last process, however that ends, and the size of ``/dev/shm`` does not matter. Ranks wait in
  ``recv``, for one byte a step; nothing spins. Chunks are as small as they can be without taking longer, because the
  kernel counts what a process has touched of the memory to each process. Gloo copies everything through sockets, and
  takes two to four times as long.
- On several hosts: within each host through shared memory, between the hosts' first ranks over gloo, bound to the
  network on which the ranks have met. Left alone gloo looks up the host's name, which often leads to the loopback.
- On GPUs: NCCL; on other accelerators what ``torch.distributed`` has for them (``native_groups.py``). ``RING`` is gloo
  for everything.
- On XLA devices with one process each: XLA's collectives, each in a program of its own (``xla_backend.py``, see TPUs).
  The exchange of records right before the launch takes the place of a time limit, which XLA has not.

Sums are added in the order of ranks wherever that is ours to decide, so that results have the same bits everywhere. A
group of the user's, or any c10d backend, takes the place of all backends by a registered name.

Rendezvous, failing and leaving
----------------------------
``cluster_resolver/detect.py`` says which job a process belongs to: a ``Job``. Rank 0, or the launcher, keeps a
key-value store at the job's address. There the processes find each other (``collectives/rendezvous.py``) and, before
they open any connection, compare a description of themselves: number of processes, cluster, versions of torch and of
this library, strategy, options. A process can join a job once; one that is started again alone is refused, because
the others are somewhere in the middle of the program. While they gather, the first one that came holds a connection to
each of the others (``Roll`` in ``collectives/joining.py``), so that the death of one is known at once; of those that
never came, ``torchstrategy launch`` tells in the store. Every listener reads many callers' greetings side by side, each
within seconds (``Door`` in ``collectives/connections.py``).

Afterwards they talk over a **control plane** (``collectives/control.py``), and the store is needed only for further
strategies. Up to 16 ranks the first rank of each host is its leader; each rank holds one connection to its leader, and
leaders one to each other. More are the tree of records, in which none has more than 17. A host is a kernel, a network
and a PID namespace, and a shared memory. One thread of each process serves them and answers also while the program
computes or waits. A rank that fails says so before it raises, and the others, also those that wait in a collective,
raise ``ReplicaFailedError`` with its name and its error.

What one says to all goes over each connection once, equal things of several ranks together, and comes back as one
acknowledgement when all behind a connection know it (``collectives/notices.py``). A rank of the tree that dies cuts it,
and is the failure that both sides tell their own; what is said later does not cross the gap. It would need a second way
to each rank: the job is over, and what the ranks behind say in their errors names the same rank.

- A process that **died** is known by its closed connection, within milliseconds. Forked children, such as loader
  workers, close their copies of the connections, which would otherwise outlive their parent.
- Where only an **accelerator waits**, as in NCCL, nobody looks at a check: the watch ends such groups from a thread, at
  once if a rank has died, and after 5 seconds in which the accelerator waits if one has failed. Results are NaN then,
  ``run`` and checkpoints raise (``native_groups.py``).
- A process that is **stopped or cut off** is known by its silence, for 10 seconds (``TORCHSTRATEGY_HEARTBEAT_S``). A
  rank also asks the kernel about silent ones of its own host, since native code may keep Python's threads from running
  for long. For the same reason a small process beats for each rank that is connected to another host, over connections
  of its own, unless the kernel says that the rank is stopped (``base/job.py``). TCP's keepalive can't do that: the
  kernel answers for stopped processes, too. Silence counts only for those who wait: a rank that is heard again before
  anyone needed it is forgiven.
- A **connection for data** that breaks though both ends live is seen by these two only, which tell all others. They do
  so a moment later, in which the other end may be found dead, or says what has happened to it.
- When **nothing goes on** for a minute (``TORCHSTRATEGY_STALL_S``), the first rank that waits logs who waits where and
  who has not come, and writes all ranks' stacks to a file (``base/stalls.py``). So does a process whose replicas wait
  for one of them. What happens for the first time has five times as long. ``torchstrategy doctor --job`` asks for the
  same at any time, over a Unix socket of each process.
- When a **deadline** passes (``timeout_seconds``, else half an hour), the ranks are asked where they are: the message
  says who arrived, who did not, and the stack of each rank that is elsewhere.
- A failure that **all ranks** have at the same point, as when ``run`` raises the same error everywhere and the
  program goes on, ends nothing: each rank knows from the counts of begun collectives whether the others were past
  that point.
- A failure of **one rank between two collectives** lets the others through the first of them, no matter which process
  runs first: the report says which collectives the rank had got through, and whoever still waits for one of these
  does so for up to 5 seconds more. So all ranks end at the same step, and a failure that the others are about to
  have, too, is known as one of all.

``torchstrategy launch`` adds to torch's launcher one exchange for each round over the rendezvous' own store: the
workers' addresses, which become ``TF_CONFIG``, the attempt, because a torch launcher counts only its own workers'
failures, and a new store for the workers. ``torchrun`` keeps one for all rounds, in which ranks of one round find each
other by rank 0 (``collectives/rounds.py``). A worker's program runs in a wrapper that imports nothing of ours, so that
it can set variables before torch reads them, and that dies with its launcher. The doctor's checks are functions of a
``Host``, which tests replace.

A process that leaves says so, and waits until the others have read it, at most a second. The store is asked from a
thread, because its client can't be interrupted.

Tests make hosts as unnamed network namespaces joined by TUN devices, whose packets a process of ours carries: no
kernel module is needed, and the kernel removes all of it when that process ends.

A failed rank can't be replaced while the others run, because their collectives are at a certain point of the program.
The job starts again from its last checkpoint, by the launcher or by hand, also with other numbers of processes
(``ElasticTraining`` in ``fit/callbacks/elastic_training.py``).
"""
