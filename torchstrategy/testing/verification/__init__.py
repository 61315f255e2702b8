"""Compares a program's steps with one replica and with several, and names the cause of what differs.

``torchstrategy verify`` runs the script in new interpreters with torch's hooks in place, and compares records that
they leave as files. A record has numbers only, so causes can be tested without a program, and one set of rules serves
the command and ``verify_replication``. A cause that leaves open whether the program is right is never a deviation:
the exit status is 2.
"""
