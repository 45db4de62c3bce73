"""A search over the settings of a run: many runs, told apart by some of their keys, and the best of them.

space.py      which keys are searched, wherever a config comes from
study.py      trials: begun, judged by the interquartile mean over their seeds, stopped, told to Optuna
population.py what becomes of the worst trials of a population (PBT)
places.py     processes of this machine, or of a Ray cluster, that run them
runner.py     one run, or a part of one, in such a process
result.py     what was found: a table, pictures, a preset, and what fresh seeds say of it
tune.py       `bray.tune`

A trial is `STUDY/trial-0007/seed-0`, ...: ordinary run directories. What a study knows of its trials is in Optuna's
storage alone: a study that was killed goes on from there and from the checkpoints of its runs.
"""
