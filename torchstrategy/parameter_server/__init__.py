"""Variables and optimizers that live on parameter servers."""
