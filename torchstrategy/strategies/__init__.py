"""``Strategy``, what its replicas see, and the strategies: one file each, of which none imports another."""
