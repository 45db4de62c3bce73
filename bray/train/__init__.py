"""Training: sources of pieces, one driver over them, evaluation. No Ray, no files of its own."""
