"""`bray algos`: which there are, what one is, and which fit an environment."""

from __future__ import annotations

import inspect
import re
from typing import Any

from rich.text import Text

from bray.cli.options import Algos
from bray.cli.show import facts, key_table, log_shown, plain_table, put, say
from bray.config.runfile import presets, scores, settings
from bray.diagnosis.advise import Advice, rank
from bray.errors import ConfigError
from bray.metrics import short
from bray.spec import EnvSpec, Space


def algos(options: Algos) -> int:
    """A table of all, what one is, or those that fit an environment."""
    from bray.algos import algo_name, get_algo

    if options.name is not None and options.for_env is not None:
        raise ConfigError(f"`bray algos` takes a name ({options.name}) or --for {options.for_env}, not both")
    if options.name is not None:
        _explain(algo_name(options.name), get_algo(options.name))
    elif options.for_env is not None:
        _advise(options.for_env)
    else:
        _list()
    return 0


# --- all of them ------------------------------------------------------------------------------------------------------


def _list() -> None:
    from bray.algos import ALGORITHMS, get_algo
    from bray.cli.advise import learns_from

    table = plain_table(
        "name", "learns from", "action spaces", "what it is", "presets, and how many seeds reach their score"
    )
    for name in ALGORITHMS:
        algo = get_algo(name)
        kind, spaces = learns_from(algo, PROBE), ", ".join(action_spaces(algo))
        table.add_row(Text(name, "bold"), kind, spaces, what_it_is(algo), "; ".join(_presets(name)))
    put(table)
    say(
        "\n`bray algos NAME` explains one, `bray algos --for ENV` says which fit an environment; --run also takes "
        "module:Name of your own.",
        "dim",
    )


def _presets(algo: str) -> list[str]:
    """`CartPole-v1 5/5` for each preset; without a measurement the name alone."""
    found = [s for s in scores() if s["run"] == algo and settings(s) == "preset" and s["must"] == "reach"]
    measured = {s["env"]: s for s in found}
    names = [env for name, env, _ in presets() if name == algo]
    return [f"{env} {m['passed']}/{m['seeds']}" if (m := measured.get(env)) else env for env in names]


def _docstring(algo: Any) -> str:
    return (inspect.getdoc(algo) or "").partition("\n")[0].partition("   ")[0].strip()


def what_it_is(algo: Any) -> str:
    """The first sentence of its docstring, without its name and its papers."""
    return re.sub(r" ?\([^()]*\d{4}[^()]*\)", "", _docstring(algo).partition(": ")[2])


def papers(algo: Any) -> str:
    """Those that its docstring names in parentheses."""
    return "; ".join(re.findall(r"\(([^()]*\d{4}[^()]*)\)", _docstring(algo)))


_DISCRETE = Space("discrete", (), "int64", n=(3,), start=(0,))
_BOX = Space("box", (2,), "float32", -1.0, 1.0)
PROBE = EnvSpec("probe", Space("box", (4,), "float32"), _DISCRETE)
ACTIONS = {
    "discrete": _DISCRETE,
    "multi-discrete": Space("multi_discrete", (2,), "int64", n=(3, 2), start=(0, 0)),
    "box": _BOX,
    "dict/tuple": Space("dict", parts=(_DISCRETE, _BOX), names=("a", "b")),
}
"""One space of each kind."""
TEAM = EnvSpec(
    "probe",
    Space("dict", parts=(Space("box", (2, 4), "float32"),), names=("obs",)),
    Space("multi_discrete", (2,), "int64", n=(3, 3), start=(0, 0)),
    team=("a", "b"),
)


def action_spaces(algo: Any) -> list[str]:
    """Kinds of actions that an algorithm takes: it is asked."""
    from bray.algos import refusal

    specs = {kind: EnvSpec("probe", PROBE.observation, space) for kind, space in ACTIONS.items()}
    specs["teams"] = TEAM
    return [kind for kind, spec in specs.items() if not refusal(algo, spec)]


# --- one of them ------------------------------------------------------------------------------------------------------


def _explain(name: str, algo: Any) -> None:
    from bray.cli.advise import learns_from

    say(f"{name} · learns from {learns_from(algo, PROBE)} · {', '.join(action_spaces(algo))}", "bold")
    say(inspect.getdoc(algo) or "", "dim")
    source = getattr(algo, "written", algo)
    source = source if inspect.ismodule(source) or inspect.isclass(source) else type(source)
    say(f"{inspect.getsourcefile(source)}:{inspect.getsourcelines(source)[1] or 1}", "dim")
    say()
    told = [("papers", papers(algo)), ("presets", ", ".join(env for run, env, _ in presets() if run == name))]
    facts([(what, text or "none") for what, text in told])
    _scores(name)
    say()
    put(key_table(algo.Config))
    say(f"\nUse them as: bray train --run {name} --env ENV KEY=VALUE", "dim")


def _scores(name: str) -> None:
    """What was measured, as a table."""
    found = [s for s in scores() if s["run"] == name]
    if not found:
        facts([("scores", "not measured")])
        return
    episodes = "10 greedy episodes, of 100 on Taxi-v4"
    say(f"\nMeasured (mean of {episodes}; steps and seconds: interquartile mean over the seeds [95 %])", "dim")
    table = plain_table("env", "settings", ">score", "seeds", "steps", "seconds", "date")
    for s in found:
        sign = "< " if s["must"].endswith("below") else ""
        seeds = f"{s['passed']} of {s['seeds']}" + (f", {s['unfinished']} unfinished" if s["unfinished"] else "")
        spans = ["{:,.0f} [{:,.0f}, {:,.0f}]".format(*s[k]) for k in ("steps", "seconds")]
        table.add_row(s["env"], settings(s), f"{sign}{s['target']}", seeds, *map(Text, spans), s["date"])
    put(table)


# --- which one --------------------------------------------------------------------------------------------------------


@log_shown()
def _advise(env: str) -> None:
    """Look at an environment for a moment, and say what fits; of a game whose agents differ, for each kind of them."""
    from bray.cli.advise import candidates, look_at
    from bray.envs.config import EnvConfig

    kinds = look_at(EnvConfig(id=env))
    first: dict[str, Advice] = {}
    for agents, spec, seen in kinds:
        returns = f"{short(min(seen.returns))} ... {short(max(seen.returns))}" if seen.returns else "no episode ended"
        if seen.sparse:
            returns += ": nothing that chance did made a difference, so exploration decides here"
        if len(kinds) > 1:
            say(("\n" if agents != kinds[0].agents else "") + ", ".join(agents), "bold")
        facts(
            [
                *([("game", "of several agents; below what one of them sees and does")] if agents else []),
                ("observations", _describe(spec.observation)),
                ("actions", _describe(spec.action)),
                ("speed", f"{seen.steps_per_second:,.0f} steps a second in this process"),
                ("random returns", returns),
            ]
        )
        table = plain_table("try", "algorithm", "why")
        ranked = rank(seen, candidates(spec, bool(agents)))
        for place, advice in enumerate(ranked, 1):
            table.add_row("first" if place == 1 else str(place), Text(advice.name, "bold"), advice.why)
        say()
        put(table)
        for why, names in _refused(spec).items():
            if others := [name for name in names if name not in {advice.name for advice in ranked}]:
                say(f"\nDo not fit: {', '.join(others)}: {why}", "dim")
        if ranked:
            first[agents[0] if agents else env] = ranked[0]
    if len(kinds) > 1 and len(first) == len(kinds):
        named = ",".join(f"{name}={advice.name}" for name, advice in first.items())
        mapping = ",".join(f"{agent}={kind.agents[0]}" for kind in kinds for agent in kind.agents)
        say(f"\nbray train --env {env} --policies {named} --policy-mapping {mapping}")
    elif len(kinds) == len(first):
        ((_, advice),) = first.items()
        say(f"\nbray train --run {advice.name} --env {env} {advice.options}".rstrip())


def _refused(spec: EnvSpec) -> dict[str, list[str]]:
    """By their reason: the algorithms that do not take these spaces."""
    from bray.algos import ALGORITHMS, get_algo, refusal

    out: dict[str, list[str]] = {}
    for name in ALGORITHMS:
        if why := refusal(get_algo(name), spec):
            out.setdefault(why, []).append(name)
    return out


def _describe(space: Space) -> str:
    if space.composite:
        return f"{space.kind} of {', '.join(f'{name}: {_describe(part)}' for name, part in space.items)}"
    if space.n:
        return f"{space.kind.replace('_', '-')} ({', '.join(map(str, space.n))})"
    return f"{space.kind.replace('_', '-')} {list(space.shape)}"
