"""The fluent dataset: a description of operations, and the nodes that carry them out."""
