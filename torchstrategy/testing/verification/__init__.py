"""Compares a program's steps with one replica and with several, and names the cause of what differs."""
