"""The mathematics of reinforcement learning as pure functions.

`returns`: advantages and targets over `[T, B]`. `losses` (torch): what a Learner minimises. `transforms`: maps of
values and fractions.
Inputs are never changed; `discount` is 0 where an episode terminated, so no function takes `done`.
"""
