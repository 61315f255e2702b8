"""The fluent dataset: a description of operations, and the torchdata nodes that carry them out."""
