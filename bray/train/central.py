"""Central inference: samplers ask the process that learns, and one forward there answers all who have asked.

Observations, and the memory of a Model that has one, go through shared memory, and so do the outputs; pipes say whose
are there. The server is a thread with a copy of the Model of its own: new weights are taken between two forwards, so
that every forward is of one version. It waits for nobody: it takes the questions that have come. A *block* is the rows
of one group of environments of one worker; blocks of the same group lie side by side, so that workers which ask
together are read as one array.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import struct
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

from bray import tree
from bray.act import Policy
from bray.capture import MAX_PROGRAMS, Record
from bray.capture.transfer import pin, unpin
from bray.errors import ConfigError, EnvError
from bray.inference.torch_engine import TorchEngine, is_recurrent
from bray.train.acting import initial_state
from bray.tree.shared import SharedArrays

logger = logging.getLogger("bray")

_MESSAGE = struct.Struct("<QQ")
"""A block and the number of its question. One write of so few bytes to a pipe is never torn."""
_STOP = _FAILED = (1 << 64) - 1
_PER_WORKER = 1 << 40
"""Question numbers of one worker. A replacement counts from the next multiple, so that a late answer to the worker that
died is not taken for one of its own."""
_ERROR_BYTES = 4096
_SWITCH_S = 5e-4  # samplers wait for this thread: the learner's Python lets it run within half a millisecond, not five


@dataclass
class Line:
    """What a sampler needs for asking; it can be sent to a process that is being started."""

    inputs: SharedArrays
    outputs: SharedArrays
    error: SharedArrays
    structures: tuple[Any, Any]
    """Of inputs and outputs: the number of its array in place of each leaf."""
    blocks: list[tuple[int, slice]]
    """Of this worker, a group each: its number and its rows."""
    asking: Connection
    answers: Connection


class CentralServer:
    """See the module."""

    def __init__(
        self, model: nn.Module, policy: Policy, obs: Any, workers: int, groups: Sequence[int], record: Record = True
    ):
        """obs: an example, `[1, ...]`; groups: how many environments the groups of each worker have."""
        if getattr(model, "draws", None):
            raise ConfigError(
                "run.inference=central: this Model takes random numbers, one draw for a whole batch, and batches of "
                "several workers would share them; set run.inference=worker"
            )
        self.newest, self.model = model, copy.deepcopy(model)
        """The learner's Model, and the one that is computed."""
        outputs = None if is_recurrent(model) else tuple(dict.fromkeys((*policy.reads, *policy.keeps)))
        self._engine = TorchEngine(self.model, outputs, record)
        self._lock = threading.Lock()
        device = self._engine.device
        self._written = torch.cuda.Event() if device.type == "cuda" else None
        # Samplers wait for this stream, and nobody for the learner's: its kernels let these pass.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.forwards = self.rows = 0
        """How many there have been, and of how many rows."""
        starts = [0, *accumulate(n for n in groups for _ in range(workers))]
        self._blocks = [slice(a, b) for a, b in pairwise(starts)]
        self._workers, self.total = workers, starts[-1]
        self._sizes = _batch_sizes(max(groups), workers, len(groups), self.total)
        memory = initial_state(model)
        example = (obs,) if memory is None else (obs, memory(1))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._make_memory(example, self._engine.forward(*example))
            for size in self._sizes:  # recorded now: a recording looks at random numbers of the whole process
                self._forward(slice(0, size))
        context = multiprocessing.get_context("spawn")
        self._questions, self._asking = context.Pipe(duplex=False)
        self._pipes = [context.Pipe(duplex=False) for _ in range(workers)]
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="bray-inference")
        self._thread.start()

    def _make_memory(self, inputs: Any, outputs: Any) -> None:
        examples = [tree.leaves(inputs), tree.leaves(outputs)]
        self._structures = _numbered(inputs), _numbered(outputs)
        self._memory = [SharedArrays([x[0] for x in leaves], self.total) for leaves in examples]
        self._error = SharedArrays([np.zeros(_ERROR_BYTES, np.uint8)], 1)
        staged = SharedArrays([x[0] for x in examples[0]], self.total)
        reads = (self._memory[0].memory, staged.memory) if self._engine.device.type == "cuda" else ()
        self._pinned = [memory for memory in reads if pin(memory)]
        self._staged = staged.views()
        self._inputs, self._outputs = (arrays.views() for arrays in self._memory)
        for x, y, example in zip(self._inputs, self._staged, examples[0], strict=True):
            x[...] = y[...] = example  # rows that fill up a batch hold something that the Model takes

    def line(self, worker: int) -> Line:
        """For worker 0, 1, ..., also for one that replaces it."""
        mine = range(worker, len(self._blocks), self._workers)
        blocks = [(b, self._blocks[b]) for b in mine]
        inputs, outputs = self._memory
        return Line(inputs, outputs, self._error, self._structures, blocks, self._asking, self._pipes[worker][0])

    def take_weights(self) -> None:
        """From the next forward on, those that the learner's Model has now."""
        newest = self.newest.state_dict()
        with self._lock:
            for name, mine in self.model.state_dict().items():
                mine.copy_(newest[name])
            if self._written is not None:
                self._written.record()

    def close(self) -> None:
        if self._thread.is_alive():
            os.write(self._asking.fileno(), _MESSAGE.pack(_STOP, 0))
            self._thread.join()
            sys.setswitchinterval(self._switch)
            while self._pinned:
                unpin(self._pinned.pop())
        for end in (self._questions, self._asking, *(end for pipe in self._pipes for end in pipe)):
            end.close()

    # --- in the thread

    def _serve(self) -> None:
        with torch.cuda.stream(self._stream):
            while _STOP not in (asked := _read(self._questions)):
                try:
                    with self._lock:
                        if self._stream is not None and self._written is not None:
                            self._stream.wait_event(self._written)
                        self._answer(asked)
                except Exception as e:
                    logger.exception("central inference failed")
                    self._fail(asked, e)

    def _answer(self, asked: dict[int, int]) -> None:
        blocks = sorted(asked)
        rows = [self._blocks[b] for b in blocks]
        batch = self._batch(rows)
        outputs = self._forward(batch)
        at = 0
        for mine in rows:
            n = mine.stop - mine.start
            start = mine.start - batch.start if isinstance(batch, slice) else at
            for to, given in zip(self._outputs, outputs, strict=True):
                to[mine] = given[start : start + n]
            at += n
        self.forwards, self.rows = self.forwards + 1, self.rows + at
        for b in blocks:
            self._send(b, asked[b])

    def _batch(self, rows: list[slice]) -> slice | int:
        """Which rows to compute: those between two places of the memory where they lie side by side; else they are
        copied, and it is how many."""
        count = sum(r.stop - r.start for r in rows)
        size = next(s for s in self._sizes if s >= count)
        if rows[-1].stop - rows[0].start == count:
            start = min(rows[0].start, self.total - size)
            return slice(start, start + size)
        for staged, given in zip(self._staged, self._inputs, strict=True):
            np.concatenate([given[r] for r in rows], out=staged[:count])
        return size

    def _forward(self, batch: slice | int) -> list[Any]:
        arrays = [x[batch] for x in self._inputs] if isinstance(batch, slice) else [x[:batch] for x in self._staged]
        outputs = self._engine.forward(*tree.map(arrays.__getitem__, self._structures[0]))
        return tree.leaves_like(self._structures[1], outputs)

    def _send(self, block: int, number: int) -> None:
        os.write(self._pipes[block % self._workers][1].fileno(), _MESSAGE.pack(block, number))

    def _fail(self, asked: Iterable[int], e: Exception) -> None:
        text = "".join(traceback.format_exception(e)).encode()[-_ERROR_BYTES:]
        self._error.views()[0][0] = np.frombuffer(text.ljust(_ERROR_BYTES), np.uint8)
        for b in asked:
            self._send(b, _FAILED)


def _batch_sizes(rows: int, workers: int, groups: int, total: int) -> list[int]:
    """Rows of a forward, few enough to record each: 1, 2, 4, ... blocks, one group of all workers, and all."""
    blocks = {1 << i for i in range((workers * groups).bit_length())} | {workers}
    return sorted({min(total, n * rows) for n in blocks} | {total})[-MAX_PROGRAMS + 1 :]


def _read(pipe: Connection) -> dict[int, int]:
    """Wait for messages; the newest number of each block."""
    return dict(_MESSAGE.iter_unpack(os.read(pipe.fileno(), 256 * _MESSAGE.size)))


def _numbered(structure: Any) -> Any:
    numbers = iter(range(len(tree.leaves(structure))))
    return tree.map(lambda _: next(numbers), structure)


class CentralServers:
    """A server for each policy of a game."""

    def __init__(self, servers: dict[str, CentralServer]):
        self._servers = servers

    def line(self, worker: int) -> dict[str, Line]:
        return {name: server.line(worker) for name, server in self._servers.items()}

    def take_weights(self) -> None:
        for server in self._servers.values():
            server.take_weights()

    def values(self) -> Iterable[CentralServer]:
        return self._servers.values()

    def close(self) -> None:
        for server in reversed(self._servers.values()):  # each puts back what it found
            server.close()


# --- in a sampler -----------------------------------------------------------------------------------------------------


class Answers:
    """Which questions of this process have been answered."""

    def __init__(self, line: Line):
        self._line = line
        self._newest: dict[int, int] = {}

    def wait(self, block: int, number: int) -> None:
        while self._newest.get(block) != number:
            if self._newest.pop(block, None) == _FAILED:
                text = self._line.error.views()[0].tobytes().decode(errors="replace").rstrip()
                raise EnvError(f"{text}\ncentral inference failed in the process that learns")
            self._newest |= _read(self._line.answers)


class CentralEngine:
    """The Model of the process that learns, asked for one group of environments."""

    def __init__(self, line: Line, group: int, answers: Answers, life: int = 0):
        self._line, self._answers, self._number = line, answers, life * _PER_WORKER
        self._block, rows = line.blocks[group]
        self._inputs = [x[rows] for x in line.inputs.views()]
        self._outputs = [x[rows] for x in line.outputs.views()]

    def ask(self, *inputs: Any) -> None:
        """Put a question; `answer` waits for what comes of it."""
        for to, given in zip(self._inputs, tree.leaves_like(self._line.structures[0], inputs), strict=True):
            np.copyto(to, given)
        self._number += 1
        os.write(self._line.asking.fileno(), _MESSAGE.pack(self._block, self._number))

    def answer(self) -> Any:
        self._answers.wait(self._block, self._number)
        return tree.map(lambda i: self._outputs[i].copy(), self._line.structures[1])  # the next answer writes over them

    def forward(self, *inputs: Any) -> Any:
        self.ask(*inputs)
        return self.answer()
