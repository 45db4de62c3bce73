"""What the rows of a run tell of it: where its time goes (`bottleneck`), what looks wrong (`symptoms`), when its
numbers stop being numbers (`divergence`).

Functions over rows, options and facts as plain data: nothing here imports torch, or knows who trains."""
