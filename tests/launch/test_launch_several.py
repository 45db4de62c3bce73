"""Several policies from a launch file: each answers the sessions of its agents of the game, and learns from them."""

import itertools
import threading

import numpy as np
import pytest
import yaml

import bray
from bray.client import Client, ClientError
from bray.envs.agent_games import Nim
from bray.launch.build import build
from bray.launch.graph import load
from bray.launch.modules import check_modules


def of(name, algorithm, settings):
    """The components of a policy."""
    agent = {"kind": "agent", "module": "bray.remote.actor.policy_agent", "class": "PolicyAgent", "wait_s": 5.0}
    return {
        f"{name}_model": {"kind": "model", "algo": f"{name}_algo", "local_mode": True},
        f"{name}_buffer": {"kind": "buffer", "size": 2, "batch_size": 32, "num_workers": 1},
        name: {**agent, "algo": f"{name}_algo", "model": f"{name}_model", "buffer": f"{name}_buffer", "seats": [name]},
        f"{name}_trainer": {
            "kind": "trainer",
            "algo": f"{name}_algo",
            "model": f"{name}_model",
            "buffers": [f"{name}_buffer"],
        },
        f"{name}_algo": {
            "kind": "config",
            "algorithm": algorithm,
            "env": "bray.envs.agent_games:Nim",
            "settings": settings,
            "model": {"fcnet_hiddens": [16]},
        },
    }


@pytest.fixture
def run(tmp_path):
    actor = {"kind": "actor", "port": 0, "num_workers": 1, "actors_per_worker": 8, "serialize": "json"}
    graph = {
        "project": str(tmp_path / "runs"),
        "trial": "v0",
        **of("first", "PPO", {"epochs": 1, "minibatches": 1}),
        **of("second", "DQN", {"learning_starts": 60, "train_every": 4}),
        "actor1": {**actor, "agents": ["first", "second"], "episode_length": 8},
    }
    file = tmp_path / "several.yaml"
    file.write_text(yaml.safe_dump(graph, sort_keys=False))
    loaded = load(file)
    check_modules(loaded)
    session = bray.init(loaded.settings.project, loaded.settings.trial, cluster="local")
    yield build(loaded, session)
    bray.shutdown()


def play(port, name):
    game = Nim()
    clients = {agent: Client("127.0.0.1", port) for agent in game.possible_agents}
    try:
        for agent, client in clients.items():
            client.start(name, agent)
        seen, paid, over = game.reset()[0], dict.fromkeys(clients, 0.0), False
        while not over:
            ((agent, obs),) = seen.items()
            tick = {"obs": {k: v.tolist() for k, v in obs.items()}, "reward": paid.get(agent, 0.0)}
            seen, paid, ended, _, _ = game.step({agent: clients[agent].tick(tick)["action"]})
            over = ended["__all__"]
        for agent, client in clients.items():
            last = {k: np.asarray(v).tolist() for k, v in seen[agent].items()} | {"action_mask": [1, 1, 1]}
            client.tick({"obs": last, "reward": paid[agent], "terminated": True})
            client.end()
    finally:
        for client in clients.values():
            client.close()


def test_each_policy_answers_its_agents_and_learns_from_them(run):
    port, models = run.actors["actor1"].port, {name: run.models[f"{name}_model"] for name in ("first", "second")}
    begun = {name: model.get_weights()[0] for name, model in models.items()}
    enough, troubles = threading.Event(), []

    def games(i):
        try:
            for n in itertools.takewhile(lambda n: not enough.is_set(), range(400)):
                play(port, f"{i}.{n}")
        except BaseException as e:
            troubles.append(e)

    threads = [threading.Thread(target=games, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for name, model in models.items():
        while model.step < 3 and any(t.is_alive() for t in threads):
            threads[0].join(0.1)
        assert model.step >= 3, (name, troubles)
    enough.set()
    for thread in threads:
        thread.join()
    assert not troubles
    for name, model in models.items():
        now, _ = model.get_weights()
        assert any(not np.array_equal(now[k], begun[name][k]) for k in now)
    with (
        Client("127.0.0.1", port) as client,
        pytest.raises(ClientError, match=r"<game>-agent-<agent> of first, second"),
    ):
        client.start("game", "third")
