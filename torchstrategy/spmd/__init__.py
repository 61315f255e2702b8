"""Several replicas in one program that XLA compiles for several devices: the replica function is traced once."""
