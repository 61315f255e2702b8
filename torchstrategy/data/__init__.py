"""Distributed datasets: global batches in, one share for each replica out."""
