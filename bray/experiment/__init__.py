"""An experiment: an algorithm, an environment (or live games) and a run directory.

setup.py        arguments and sources -> a checked config                goals.py     stop conditions, and what the best
                checkpoint goes by
saved.py        what is read of a run directory, and what it may import  start.py     a run that starts with another's
                weights
experiment.py   train, save, load, resume, evaluate, serve               policy.py    a trained policy without its
                environment
progress.py     result rows, their files, their picture                  export.py    graph.onnx of a run
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
