"""How the gradients of all replicas become their sum, and buffers their average."""
