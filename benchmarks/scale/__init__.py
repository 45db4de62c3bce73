"""How throughput grows with rollout workers, what they cost, and what killing them does."""
