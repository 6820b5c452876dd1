"""Several processes that serve the same models behind one address, on a cluster of Ray."""
