"""Pages that show what run directories hold. They read run directories only: no page knows of a cluster or of a
training."""
