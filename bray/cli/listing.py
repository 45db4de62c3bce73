"""What there is to play: `bray envs`, `bray check-env`."""

from __future__ import annotations

import fnmatch

from rich.text import Text

from bray.cli.options import CheckEnv, Envs
from bray.cli.show import facts, log_shown, plain_table, put, say
from bray.config import parse_assignments, resolve
from bray.config.runfile import presets
from bray.errors import UnknownName


def envs(options: Envs) -> int:
    """A table of names that match."""
    from bray.envs import native, registry
    from bray.envs.config import EnvConfig

    names = registry.list_envs()
    tuned = [(algo, env) for algo, env, _ in presets()]
    known = {name: sorted({a for a, e in tuned if fnmatch.fnmatchcase(name, e)}) for name in names}
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
            Text(name, "bold" if known[name] else ""),
            "native" if fast else Text("–", "dim"),
            ", ".join(known[name]),
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
