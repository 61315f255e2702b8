"""Checkpoints: written once by the chief, complete or invisible, restored with any strategy or none.

A checkpoint holds each value once, as a program without a strategy would save it, so any number of replicas restores
it. The chief writes to a temporary name and renames at the end: a checkpoint is complete or invisible (``storage``). A
process that is given another path writes there afterwards, as tf's programs expect. Files hold tensors and plain values
and are read with ``weights_only=True``; a sum of every byte finds damage (``archive``, ``seal``). Which checkpoints a
directory has is known by their seals (``directory``), and one attempt of a job writes to it (``fencing``). What an
aggregated variable or a metric holds on all replicas is captured by all processes before the chief writes.

A restore keeps the values whose object does not exist yet, and gives them where the object is attached. Attaching
checks first and never communicates, so that a rank can't wait for one that attaches in another order.
"""
