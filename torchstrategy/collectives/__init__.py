"""Collectives: between the replicas of one process and between processes."""
