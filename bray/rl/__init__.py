"""The mathematics of reinforcement learning as pure functions.

`returns` (Numba): GAE and n-step returns over `[T, B]`. `losses` (torch):
what a Learner minimises. Inputs are never changed; `discount` is 0 where an episode terminated, so no function takes `done`.
"""
