"""An experiment: an algorithm, an environment (or live games) and a run directory.

experiment.py   train, save, load, resume, evaluate, serve: over one `bray.train.run.Run`
saved.py        what is read of a run directory, and what it may import
start.py        a run that starts with another's weights
places.py       where it runs, writes and plays
evaluations.py  evaluations and films while it trains, in line or in a process of their own (evaluator.py)
policy.py       a trained policy without its environment
export.py       graph.onnx of a run
"""

from bray.experiment.experiment import Experiment, torch_engine
from bray.experiment.export import export_graph
from bray.experiment.policy import ServedPolicy
from bray.train.goals import OWN_KEYS, ROW_KEYS, VOLATILE

__all__ = [
    "OWN_KEYS",
    "ROW_KEYS",
    "VOLATILE",
    "Experiment",
    "ServedPolicy",
    "export_graph",
    "torch_engine",
]
