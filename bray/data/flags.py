"""The flag byte of a replay row. Compiled kernels hold these numbers as constants: after a change, delete their cache
files."""

TERMINATED = 1
TRUNCATED = 2
VALID = 4
"""Neither a dead row nor one that waits: its action did something and its successor is the next row."""
FIRST = 8
"""First row of an episode, or of a run of rows behind a gap."""
RETIRED = 16
"""Sampled `max_use` times."""
JOINT = 32
"""A FIRST row in the middle of an episode: what was played before it is not here, but the memory that it was played
with is."""
ENDED = TERMINATED | TRUNCATED
ELIGIBLE_MASK = VALID | RETIRED
ELIGIBLE = VALID
"""`flags & ELIGIBLE_MASK == ELIGIBLE`: may be drawn."""
