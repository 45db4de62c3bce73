"""The options of a RemoteModel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bray.config.declare import Amount, Count, Name, Positive, Whole


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a RemoteModel can be told, in Python and in launch files."""

    checkpoint_interval: Count | None = None
    """Steps between checkpoints of the model; `null` = every minute, or as `checkpoint_every_s` says."""
    checkpoint_every_s: Positive = 60.0
    """Seconds between checkpoints of the model, where `checkpoint_interval` is null. There is one at the start and one
    at the end too."""
    keep_checkpoints: Count | None = 5
    """Newest checkpoints that stay, of the model and of its trainer; `null` = all. Beside them stay versions that were
    cloned or added to the pool, and the best one (by the mean return of the last 100 episodes, where agents say it):
    `--mode deploy model1.versions={best: 1}` serves it."""
    checkpoint: Whole | Name | None = None
    """What the model starts from: a step of this trial or the path of a weight file; `null` = the newest checkpoint. In
    deploy mode also the path of another run directory, as `bray train` makes it."""
    max_batch_size: Count = 1
    """Samples that one forward takes together at most."""
    num_workers: Whole = 0
    """Processes that do forwards; 0 = the process that asks does them itself."""
    cpus_per_worker: Amount = 1.0
    """CPUs of each process."""
    gpus_per_worker: Amount = 0.0
    """GPUs of each process; parts are shared."""
    memory_per_worker: Whole = 1024
    """Memory of each process, in MB."""
    use_onnx: Literal["train", "infer", "quantize"] | None = None
    """`train`: an ONNX graph whose weights can be published; `infer`: constant weights, faster; `quantize`: int8;
    `null`: PyTorch. In deploy mode `null` asks for PyTorch only where the file says it; see "Deploying"."""
    local_mode: bool = False
    """The process that asks does the forwards itself, whatever `num_workers` says."""
    override_model: bool = True
    """Register the model anew at each start; `false` takes the one of the trial that is there, which starts faster."""
    tensorboard_graph: bool = False
    """Show the graph of the model in TensorBoard."""
    tensorboard_step: bool = False
    """The x axis of TensorBoard is this model's step."""
