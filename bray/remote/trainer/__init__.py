"""Training: the loop of a rank (`drive`), and the handle that places ranks in a cluster."""
