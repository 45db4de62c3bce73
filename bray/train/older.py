"""Training states that older versions of Bray have saved, in today's form."""

from __future__ import annotations

from typing import Any


def from_0_1(state: dict[str, Any]) -> dict[str, Any]:
    """What a training of 0.1 can give: weights, optimizers, targets, counters, random states, statistics. The
    environments begin new episodes, since 0.1 may have stepped them in another form, and a replay, which had another
    layout, is filled anew."""
    arrays, json = dict(state["arrays"]), dict(state["json"])
    played, seen = json.pop("rollout"), dict(arrays.pop("rollout"))
    arrays.pop("replay", None)
    experience = {}
    if "sample_rng" in json:
        experience = {
            "rng": json["sample_rng"],
            "due": json["due"],
            "left": 0,
            "version": json["learner"]["steps"],
            "rows": False,
            "came": played["env_steps"] > 0,
            "old_layout": bool(json["replay"]),
        }
    arrays |= {"episodes": seen.pop("stats"), "sources": {"0": seen | {"env": {}}}, "experience": {}}
    sources = [{"env": None, "rng": played["rng"], "env_steps": played["env_steps"], "exact": False}]
    json |= {"sources": sources, "experience": experience, "env_steps": played["env_steps"], "dropped": 0}
    return {"arrays": arrays, "json": json}
