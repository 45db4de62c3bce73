"""Does it learn? Each case trains the shipped preset on several seeds until a greedy evaluation reaches the reference
score."""
