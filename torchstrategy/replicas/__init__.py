"""Hosting replicas: what a scope records, one copy of it for each replica of the process, and their threads."""
