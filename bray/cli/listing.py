"""What there is: `bray algos`, `bray envs`, `bray check-env`."""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any

from rich.text import Text

from bray.cli.options import Algos, CheckEnv, Envs
from bray.cli.show import facts, key_table, log_shown, plain_table, put, say
from bray.config import parse_assignments, resolve
from bray.config.runfile import presets
from bray.errors import BrayError, UnknownName

# --- algorithms -------------------------------------------------------------------------------------------------------


def algos(options: Algos) -> int:
    """A table of all, or the config keys of one."""
    from bray.algos import ALGORITHMS, algo_name, get_algo

    if options.name is not None:
        _keys(algo_name(options.name), get_algo(options.name))
        return 0
    table = plain_table("name", "learns from", "action spaces", "what it is")
    for known in ALGORITHMS:
        algo = get_algo(known)
        learns = learns_from(algo)
        table.add_row(Text(known, "bold"), learns, ", ".join(action_spaces(algo)), _first_line(algo).partition(": ")[2])
    put(table)
    say("\n`bray algos NAME` lists config keys; --run also takes module:Name of your own.", "dim")
    return 0


def _first_line(algo: Any) -> str:
    return (inspect.getdoc(algo) or "").partition("\n")[0].partition("   ")[0].strip()


def learns_from(algo: Any) -> str:
    """The kind of its experience."""
    from bray.algos import make_experience
    from bray.nn.catalog import ModelConfig
    from bray.spec import EnvSpec, Space

    spec = EnvSpec("probe", Space("box", (4,), "float32"), Space("discrete", (), "int64", n=(3,), start=(0,)))
    return type(make_experience(algo, algo.Config(), spec, ModelConfig())).__name__.lower()


def action_spaces(algo: Any) -> list[str]:
    """Kinds of actions that an algorithm takes, found by asking it for a Model and a Policy for each."""
    from bray.nn.catalog import ModelConfig
    from bray.spec import EnvSpec, Space

    discrete = Space("discrete", (), "int64", n=(3,), start=(0,))
    box = Space("box", (2,), "float32", -1.0, 1.0)
    kinds = {
        "discrete": discrete,
        "multi-discrete": Space("multi_discrete", (2,), "int64", n=(3, 2), start=(0, 0)),
        "box": box,
        "dict/tuple": Space("dict", parts=(discrete, box), names=("a", "b")),
    }
    out = []
    for kind, space in kinds.items():
        spec = EnvSpec("probe", Space("box", (4,), "float32"), space)
        config, model = algo.Config(), ModelConfig()
        try:
            algo.Policy(config, spec)
            algo.Learner(config, spec, algo.make_model(config, spec, model), model, seed=0, record=False)
        except BrayError:
            continue
        out.append(kind)
    return out


def _keys(name: str, algo: Any) -> None:
    say(
        f"{name} · learns from {learns_from(algo)} · {', '.join(action_spaces(algo))}",
        "bold",
    )
    say(inspect.getdoc(algo) or "", "dim")
    source = algo if inspect.ismodule(algo) or inspect.isclass(algo) else type(algo)
    say(f"{inspect.getsourcefile(source)}:{inspect.getsourcelines(source)[1] or 1}", "dim")
    say()
    put(key_table(algo.Config))
    say(f"\nUse them as: bray train --run {name} --env ENV KEY=VALUE", "dim")


# --- environments -----------------------------------------------------------------------------------------------------


def envs(options: Envs) -> int:
    """A table of names that match."""
    from bray.envs import native, registry
    from bray.envs.config import EnvConfig

    names = registry.list_envs()
    known: dict[str, list[str]] = {}  # environment -> algorithms that have tuned settings for it
    for algo, env, _ in presets():
        known.setdefault(env, []).append(algo)
    if pattern := options.pattern:
        wild = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
        found = [n for n in names if fnmatch.fnmatchcase(n.lower(), wild.lower())]
        if not found:
            raise UnknownName("environment", pattern, names)
        names = found
    table = plain_table("name", "vector form", "presets")
    for name in names:
        config = EnvConfig(id=name)
        fast = native.why_not_native(config, registry.resolve(config), None) is None
        table.add_row(
            Text(name, "bold" if name in known else ""),
            "native" if fast else Text("–", "dim"),
            ", ".join(known.get(name, [])),
        )
    put(table)
    say(f"\n{len(names):,} environments; --env also takes module:Class of your own.", "dim")
    return 0


@log_shown()
def check_env(options: CheckEnv) -> int:
    """The findings of `bray.envs.check`; 1 when one of them is an error."""
    from bray.envs.check import check_env as check
    from bray.envs.config import EnvConfig
    from bray.envs.registry import resolve as find

    given = [k if k.startswith("env.") else f"env.env_config.{k}" for k in options.keys or ()]
    config = resolve({"env": EnvConfig}, [parse_assignments([f"env.id={options.env}", *given])])["env"]
    find(config)  # a name that nothing answers to is a mistake of the user, not a finding
    findings = check(config, options.steps, options.seed)
    say(f"{options.env}: {options.steps} random steps, played twice", "bold")
    styles = {"error": "red", "warning": "yellow", "info": "dim"}
    for finding in findings:
        label, _, rest = str(finding).partition(": ")
        say(Text.assemble((f"{label:<8}", styles[finding.severity]), rest))
    counts = {s: sum(f.severity == s for f in findings) for s in styles}
    if counts["error"]:
        warnings = f", {counts['warning']} to look at" if counts["warning"] else ""
        say(f"{counts['error']} to correct before training{warnings}", "red")
        return 1
    if counts["warning"]:
        facts([("result", f"it trains; {counts['warning']} to look at")])
    else:
        say("all good: spaces, types, bounds, resets and repeatability are as they should be", "green")
    return 0
