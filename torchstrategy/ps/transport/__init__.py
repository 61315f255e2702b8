"""Authenticated connections between a coordinator, its workers and its parameter servers."""
