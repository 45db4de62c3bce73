"""A run directory: everything a run leaves behind, written so that a kill at any moment leaves the previous state
readable.

    config.yaml params.json spec.json policy.json      what was run
    result.jsonl progress.csv tb/ bray.log             what happened
    models/<name>/<step>.safetensors                   weights (step = learner steps = model version)
                  {config.yaml, spec.json, policy.json}   of each policy, where a run has several
    checkpoints/<step>/ {state.tree, meta.json, model.safetensors}   with `latest` and `best`
    episodes/ trajectories/ videos/ figures/           what was made of it

A file is written beside its place, synced and renamed; a checkpoint is a directory made the same way. `meta.json` holds
the checksums of the other files and of itself: a truncated or foreign checkpoint is refused, never half loaded and
never replaced by another one behind the user's back. Weights and graphs carry their checksum inside. Nothing is ever
unpickled, and nothing that a directory names is imported unless it is trusted (`trust.py`); all reading goes through
`reader.py`.
"""

from bray.rundir.checkpoints import Checkpoint, Model, several
from bray.rundir.files import plain, write_atomic, writing
from bray.rundir.log import log_to, logging_to
from bray.rundir.reader import check_seal, open_plain, read_json, read_plain, seal
from bray.rundir.run import TRAINER_JSON, PolicyDir, RunDir, default_run_dir, new_run_dir
from bray.rundir.state import pack_state, unpack_state
from bray.rundir.trust import UntrustedRun
from bray.rundir.weights import match_weights, read_weights

__all__ = [
    "TRAINER_JSON",
    "Checkpoint",
    "Model",
    "PolicyDir",
    "RunDir",
    "UntrustedRun",
    "check_seal",
    "default_run_dir",
    "log_to",
    "logging_to",
    "match_weights",
    "new_run_dir",
    "open_plain",
    "pack_state",
    "plain",
    "read_json",
    "read_plain",
    "read_weights",
    "seal",
    "several",
    "unpack_state",
    "write_atomic",
    "writing",
]
