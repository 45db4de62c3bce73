"""python -m benchmarks.rl_functions [--steps 128] [--batch 64 1024] [--device cpu|cuda]: how fast GAE, lambda and
n-step returns and V-trace are.

Each is timed as `bray.rl.returns` has it, for arrays (what a Learner's `prepare` uses) and for tensors, beside the
usual loop over time in torch and in numpy, in one process, in turn. Before it is timed, every form is checked against a
loop in float64. Medians of rounds; a ratio above 1 is ours faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bray.rl import returns

GAMMA, LAMBDA, N = 0.99, 0.95, 5
TOLERANCE = 1e-5
"""Of float32 sums beside float64 ones, as a part of the largest number."""

Columns = dict[str, Any]


def columns(steps: int, batch: int, seed: int = 0) -> Columns:
    """Random rows `[T, B]` with ends of episodes; all rows are valid."""
    rng = np.random.default_rng(seed)
    ends = rng.random((steps, batch))
    return {
        "value": rng.normal(size=(steps + 1, batch)).astype(np.float32),
        "reward": rng.normal(size=(steps, batch)).astype(np.float32),
        "terminated": ends < 0.01,
        "truncated": (ends >= 0.01) & (ends < 0.02),
        "valid": np.ones((steps, batch), bool),
        "ratio": rng.uniform(0.5, 1.5, (steps, batch)).astype(np.float32),
    }


# --- the usual loops, written for arrays and tensors alike ------------------------------------------------------------


def loop_gae(c: Columns) -> Any:
    alive = 1.0 - _real(c["terminated"], c["value"])
    goes_on = alive * (1.0 - _real(c["truncated"], c["value"]))
    out, carry = [], 0.0
    for t in reversed(range(len(c["reward"]))):
        delta = c["reward"][t] + GAMMA * alive[t] * c["value"][t + 1] - c["value"][t]
        carry = delta + GAMMA * LAMBDA * goes_on[t] * carry
        out.append(carry)
    return _stack(out[::-1])


def loop_lambda(c: Columns) -> Any:
    return loop_gae(c) + c["value"][:-1]


def loop_n_step(c: Columns) -> Any:
    """Each row by itself: N rewards, or fewer where its episode or the trace ends."""
    steps, out = len(c["reward"]), []
    alive = 1.0 - _real(c["terminated"], c["value"])
    goes_on = alive * (1.0 - _real(c["truncated"], c["value"]))
    for t in range(steps):
        total, scale = 0.0 * c["reward"][t], 1.0 + 0.0 * c["reward"][t]
        for k in range(t, min(t + N, steps)):
            last = 1.0 if k == min(t + N, steps) - 1 else 1.0 - goes_on[k]
            total = total + scale * (c["reward"][k] + GAMMA * alive[k] * last * c["value"][k + 1])
            scale = scale * GAMMA * goes_on[k]
        out.append(total)
    return _stack(out)


def loop_vtrace(c: Columns) -> Any:
    alive = 1.0 - _real(c["terminated"], c["value"])
    goes_on = alive * (1.0 - _real(c["truncated"], c["value"]))
    rho, out, carry = c["ratio"].clip(None, 1.0), [], 0.0
    for t in reversed(range(len(c["reward"]))):
        delta = rho[t] * (c["reward"][t] + GAMMA * alive[t] * c["value"][t + 1] - c["value"][t])
        carry = delta + GAMMA * goes_on[t] * rho[t] * carry
        out.append(c["value"][t] + carry)
    return _stack(out[::-1])


def _real(flags: Any, like: Any) -> Any:
    return flags.astype(like.dtype) if isinstance(flags, np.ndarray) else flags.to(like.dtype)


def _stack(rows: list[Any]) -> Any:
    return np.stack(rows) if isinstance(rows[0], np.ndarray) else torch.stack(rows)


# --- ours -------------------------------------------------------------------------------------------------------------


def _five(c: Columns) -> tuple[Any, ...]:
    return tuple(c[k] for k in ("value", "reward", "terminated", "truncated", "valid"))


FUNCTIONS: dict[str, tuple[Callable[[Columns], Any], Callable[[Columns], Any]]] = {
    "GAE": (lambda c: returns.gae(*_five(c), GAMMA, LAMBDA), loop_gae),
    "lambda returns": (lambda c: returns.lambda_returns(*_five(c), GAMMA, LAMBDA), loop_lambda),
    f"{N}-step returns": (lambda c: returns.n_step_returns(*_five(c), GAMMA, N), loop_n_step),
    "V-trace": (lambda c: returns.vtrace(*_five(c), c["ratio"], GAMMA).target, loop_vtrace),
}


def to_device(c: Columns, device: str) -> Columns:
    return {k: torch.from_numpy(x).to(device) for k, x in c.items()}


def check(got: Any, want: np.ndarray, what: str) -> None:
    """Refuse to time what is wrong."""
    got = got.cpu().numpy() if isinstance(got, torch.Tensor) else got
    error = float(np.abs(got - want).max() / np.abs(want).max())
    if error > TOLERANCE:
        raise SystemExit(f"{what} differs from a float64 loop by {error:.1e} of the largest number")


def microseconds(call: Callable[[], Any], device: str, seconds: float) -> float:
    """Median time of a call; on a GPU until the device has finished."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


@dataclass(frozen=True)
class Line:
    name: str
    steps: int
    batch: int
    times: dict[str, float]
    """Microseconds by form."""


def measure(steps: int, batch: int, device: str, seconds: float) -> list[Line]:
    """All functions at one size."""
    arrays = columns(steps, batch)
    exact = {k: x.astype(np.float64) if x.dtype == np.float32 else x for k, x in arrays.items()}
    tensors, lines = to_device(arrays, device), []
    for name, (ours, loop) in FUNCTIONS.items():
        forms: dict[str, tuple[Callable[[Columns], Any], Columns]] = {
            "tensors": (ours, tensors),
            "torch loop": (loop, tensors),
        }
        if device == "cpu":
            forms = {"arrays": (ours, arrays), **forms, "numpy loop": (loop, arrays)}
        want = loop(exact)
        for form, (function, c) in forms.items():
            check(function(c), want, f"{name}, {form}")
        times = {form: microseconds(lambda f=f, c=c: f(c), device, seconds) for form, (f, c) in forms.items()}
        lines.append(Line(name, steps, batch, times))
    return lines


def show(lines: list[Line], device: str) -> None:
    forms = list(lines[0].times)
    print(f"{device}; microseconds a call, median")
    print(f"{'':16}{'T x B':>12}" + "".join(f"{form:>13}" for form in forms) + f"{'torch loop / ours':>20}")
    for line in lines:
        best = min(t for form, t in line.times.items() if "loop" not in form)
        size = f"{line.steps} x {line.batch}"
        row = "".join(f"{line.times[form]:13,.0f}" for form in forms)
        print(f"{line.name:16}{size:>12}{row}{line.times['torch loop'] / best:19.1f}x")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[128, 1024], help="rows in time")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 256], help="columns")
    parser.add_argument("--device", choices=["cpu", "cuda"], action="append", help="default: both where there is a GPU")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each function and form")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for device in options.device or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]):
        sizes = [(t, b) for t in options.steps for b in options.batch]
        show([line for t, b in sizes for line in measure(t, b, device, options.seconds)], device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
