"""Running a Model: numpy trees in, numpy trees out. No Ray here."""
