"""`bray serve`: a trained policy answers games."""

import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

import bray
from bray import act
from bray.cli.main import main
from bray.client import ClientError
from bray.config import ConfigSource
from bray.errors import CheckpointError, ConfigError
from bray.experiment import Experiment, export_graph
from bray.inference.onnx_engine import OnnxEngine
from bray.service import PolicyActor, PolicyService, configure, name_runs
from bray.serving.background import BackgroundServer
from bray.serving.config import ServedModelConfig, ServiceConfig
from bray.serving.protocol import START, TICK
from bray.serving.record import read_recording
from bray.spec import EnvSpec, Space
from tests.serving.test_recordings import mutated, recording_of

ROOT = Path(__file__).parents[2]


def train(path, iterations=2, **config):
    exp = Experiment(path=path, use_preset=False, **({"num_envs": 2, "rollout_length": 16} | config))
    for _ in exp.train(stop={"training_iteration": iterations}):
        pass
    exp.close()
    return path


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """A run with several checkpoints, exported once."""
    path = train(
        tmp_path_factory.mktemp("run") / "ppo", 3, run="PPO", env="CartPole-v1", checkpoint_freq=1, keep_checkpoints=5
    )
    export_graph(path)
    return path


@pytest.fixture
def run(cartpole, tmp_path):
    """A copy that a test may change."""
    ours = shutil.ignore_patterns("*.keep")  # marks of services that run meanwhile
    return Path(shutil.copytree(cartpole, tmp_path / "run", symlinks=True, ignore=ours))


@contextlib.contextmanager
def serving(runs, **settings):
    """A service in a thread, and its address."""
    service_config, model_config = configure(
        [bray.config.ConfigSource("test", {"port": 0, "admin_port": 0, **settings})]
    )
    service = PolicyService(runs, model_config, torch_engine=bray.experiment.torch_engine)
    with BackgroundServer(service.make_actor, service_config, service.prepare) as server:
        server.service = service
        yield server


@pytest.fixture(scope="module", autouse=True)
def admin_token():
    """Changes at the admin port need one; services read it from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRAY_ADMIN_TOKEN", "for-tests")
        yield


def admin(server, path, wish=None):
    data = None if wish is None else json.dumps(wish).encode()
    headers = {"Authorization": "Bearer for-tests"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.admin_port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


OBS = [0.01, -0.02, 0.03, 0.04]


def some_obs(n, seed=0):
    return np.random.default_rng(seed).normal(scale=0.5, size=(n, 4)).astype(np.float32)


# --- a graph proves itself --------------------------------------------------------------------------------------------


def test_a_service_refuses_a_graph_that_answers_otherwise_than_where_it_was_exported(run, monkeypatch):
    real = OnnxEngine.forward
    monkeypatch.setattr(OnnxEngine, "forward", lambda self, *args: {"dist": 1.5 * real(self, *args)["dist"] + 0.1})
    with pytest.raises(CheckpointError, match=r"graph\.onnx: it is not used.* Output 'dist' is off by \S+, at most"):
        PolicyService({"m": run}, ServedModelConfig())


def test_a_graph_is_proved_once_whatever_version_is_served(run, monkeypatch):
    asked = []
    real = OnnxEngine.forward
    monkeypatch.setattr(OnnxEngine, "forward", lambda self, obs: asked.append(len(obs)) or real(self, obs))
    first, *_, last = steps_of(run)
    with serving({"m": run}, versions={str(first): 1.0}) as server, bray.Client(port=server.port) as client:
        client.start()
        admin(server, "/models/m", {"pin": last})
        client.tick({"obs": OBS})
    assert [n for n in asked if n > 1] == [32]


# --- acting -----------------------------------------------------------------------------------------------------------


def test_the_service_acts_as_the_experiment_does(cartpole):
    exp = Experiment.load(cartpole)
    with serving({"m": cartpole}) as server, bray.Client(port=server.port) as client:
        assert client.start(data={}) == {"model": "m", "version": steps_of(cartpole)[-1]}
        for obs in some_obs(50):
            assert client.tick({"obs": obs.tolist()})["action"] == exp.policy(obs)
        assert client.end(data={}) == {}


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_engines_agree(cartpole, engine):
    exp = Experiment.load(cartpole)
    with serving({"m": cartpole}, engine=engine) as server, bray.Client(port=server.port) as client:
        client.start()
        assert [client.tick({"obs": x.tolist()})["action"] for x in some_obs(20)] == [
            exp.policy(x) for x in some_obs(20)
        ]


def test_stateless_and_tcp(cartpole):
    exp = Experiment.load(cartpole)
    with serving({"m": cartpole}, use_tcp=True) as server, bray.Client(port=server.port, tcp=True) as client:
        assert client.step({"obs": OBS})["action"] == exp.policy(np.float32(OBS))
        client.start()
        assert client.tick({"obs": OBS})["action"] == exp.policy(np.float32(OBS))


def test_sampling_draws_and_greedy_does_not(cartpole):
    def actions(**settings):
        with serving({"m": cartpole}, **settings) as server, bray.Client(port=server.port) as client:
            client.start()
            return {client.tick({"obs": OBS})["action"] for _ in range(60)}

    assert len(actions()) == 1
    assert actions(act="sample") == {0, 1}


def test_many_sessions_share_batches(cartpole):
    """Each gets its own answer, whatever else is in its batch."""
    exp = Experiment.load(cartpole)
    obs = some_obs(200)
    expected = [int(exp.policy(x)) for x in obs]

    async def play(port):
        clients = [bray.AsyncClient(port=port) for _ in range(20)]
        for c in clients:
            await c.start()

        async def game(i):
            return [(await clients[i].tick({"obs": x.tolist()}))["action"] for x in obs[i * 10 : i * 10 + 10]]

        out = await asyncio.gather(*[game(i) for i in range(20)])
        for c in clients:
            await c.end()
            await c.close()
        return [a for game in out for a in game]

    with serving({"m": cartpole}) as server:
        assert asyncio.run(play(server.port)) == expected
        numbers = server.call(server.service.numbers)
        assert numbers['bray_model_samples_total{model="m"}'] >= 200
        assert numbers['bray_model_batches_total{model="m"}'] < numbers['bray_model_samples_total{model="m"}']


def test_a_mask_forbids_actions(cartpole):
    with serving({"m": cartpole}) as server, bray.Client(port=server.port) as client:
        client.start()
        for legal in (0, 1):
            mask = [int(i == legal) for i in range(2)]
            assert {client.tick({"obs": x.tolist(), "action_mask": mask})["action"] for x in some_obs(20)} == {legal}
        for mask in ([0, 0], [1], [1, 0, 1], "yes", [[1], [2, 3]]):
            with pytest.raises(ClientError, match="action_mask"):
                client.tick({"obs": OBS, "action_mask": mask})


def test_arrays_as_base64(cartpole):
    raw = base64.b64encode(np.float32(OBS).tobytes()).decode()
    with serving({"m": cartpole}) as server, bray.Client(port=server.port) as client:
        client.start()
        same = client.tick({"obs": OBS})
        assert client.tick({"obs": {"base64": raw}}) == same
        wide = base64.b64encode(np.float64(OBS).tobytes()).decode()
        assert client.tick({"obs": {"base64": wide, "dtype": "float64", "shape": [4]}}) == same


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "expected a JSON object"),
        (b"not json", "expected a JSON object"),
        (b"[1, 2]", "expected a JSON object"),
        (b"{}", "obs"),
        (b'{"obs": null}', "obs: expected"),
        (b'{"obs": [1, 2, 3]}', "expected shape \\[4\\], got \\[3\\]"),
        (b'{"obs": [[1, 2, 3, 4]]}', "expected shape \\[4\\], got \\[1, 4\\]"),
        (b'{"obs": [1, 2, 3, [4]]}', "expected numbers of shape \\[4\\]"),
        (b'{"obs": [1, 2, 3, null]}', "expected finite numbers"),
        (b'{"obs": [1, 2, 3, "4x"]}', "expected numbers"),
        (b'{"obs": [1, 2, 3, 1e400]}', "expected"),
        (b'{"obs": {"base64": "!!"}}', "base64"),
        (b'{"obs": {"base64": "AAAA"}}', "base64"),
        (b'{"obs": {"base64": "AAAA", "dtype": "O"}}', "base64"),
        (b'{"obs": {"pickle": "AAAA"}}', "base64, dtype, shape"),
        (b"\xff\xfe", "expected a JSON object"),
        (b'{"obs": ' + b"[" * 5000 + b"]" * 5000 + b"}", "expected"),
    ],
)
def test_a_tick_that_makes_no_sense_is_refused(cartpole, body, message):
    with serving({"m": cartpole}) as server, bray.Client(port=server.port) as client:
        client.start()
        with pytest.raises(ClientError, match=message) as e:
            client.tick(body)
        assert (e.value.status, e.value.code) == (400, "malformed")
        assert client.tick({"obs": OBS})["action"] in (0, 1)  # the session goes on


def test_other_spaces(tmp_path):
    """Values of every kind of space, as JSON."""
    from bray.serving.values import plain, reader

    space = Space(
        "dict",
        names=("image", "unit", "flags", "pair", "level"),
        parts=(
            Space("box", (2, 2), "uint8", 0, 255),
            Space("multi_discrete", (2,), "int64", n=(3, 4), start=(0, 1)),
            Space("multi_binary", (3,), "int8"),
            Space("tuple", parts=(Space("box", (1,), "float32"), Space("discrete", (), "int64", n=(2,), start=(5,)))),
            Space("discrete", (), "int64", n=(3,), start=(0,)),
        ),
    )
    read = reader(space)
    rng = np.random.default_rng(0)
    for _ in range(20):
        value = space.sample(rng)
        again = read(json.loads(json.dumps(plain(value))))
        assert bray.tree.equal(again, bray.tree.map(np.asarray, value))
    good = plain(space.sample(rng))
    for key, bad in [
        ("image", [[0, 0], [0, 256]]),
        ("image", [[0.5, 0], [0, 1]]),
        ("unit", [0, 0]),
        ("unit", [3, 1]),
        ("pair", [[0.0], 4]),
        ("pair", [[0.0]]),
        ("level", 3),
        ("level", 1.5),
        ("flags", "abc"),
    ]:
        with pytest.raises(bray.errors.DataError, match=f"obs.{key}"):
            read({**good, key: bad})
    with pytest.raises(bray.errors.DataError, match="expected an object with the keys"):
        read({"image": good["image"]})


def test_base64_is_checked_as_lists_are():
    from bray.serving.values import reader

    def sent(array, dtype):
        return {"base64": base64.b64encode(np.array(array, dtype).tobytes()).decode(), "dtype": dtype}

    image, level = (
        reader(Space("box", (2,), "uint8", 0, 255)),
        reader(Space("discrete", (), "int64", n=(5,), start=(0,))),
    )
    assert image(sent([1, 255], "int64")).tolist() == [1, 255]
    assert image(sent([1, 255], "float32")).tolist() == [1, 255]
    for read, value in [
        (image, sent([1, 300], "int64")),  # not 44
        (image, sent([1.7, 2.0], "float64")),
        (image, sent([np.nan, 2.0], "float64")),
        (level, sent(1.5, "float64")),
        (image, {**sent([1, 2], "uint8"), "dtype": "(2,"}),
        (image, {**sent([1, 2], "uint8"), "dtype": None}),
        (image, {**sent([1, 2], "uint8"), "dtype": "S1"}),
    ]:
        with pytest.raises(bray.errors.DataError, match="obs: expected"):
            read(value)


# --- what a tick may cost, and hold -----------------------------------------------------------------------------------


def test_text_in_place_of_a_mask_is_refused_at_once(cartpole):
    with serving({"m": cartpole}) as server, bray.Client(port=server.port) as client:
        client.start()
        for mask in (["a" * 20_000] + ["b"] * 10_000, ["1", "0"], "ab", [1, "0"]):
            with pytest.raises(ClientError, match="action_mask: expected numbers of shape") as e:
                client.tick({"obs": OBS, "action_mask": mask})
            assert e.value.status == 400
        with pytest.raises(ClientError, match="obs: expected numbers of shape"):
            client.tick({"obs": ["1_0", 0, 0, 0]})
        assert client.tick({"obs": OBS})["action"] in (0, 1)


def test_a_served_policy_takes_bodies_that_its_spaces_could_need(cartpole):
    with serving({"m": cartpole}) as server, bray.Client(port=server.port) as client:
        client.start()
        assert client.tick({"obs": OBS, "comment": "x" * 50_000})["action"] in (0, 1)
        with pytest.raises(ClientError) as e:
            client.tick({"obs": OBS, "comment": "x" * 100_000})
        assert (e.value.status, e.value.code) == (413, "too_large")
    with serving({"m": cartpole}, max_body=1000) as server, bray.Client(port=server.port) as client:
        with pytest.raises(ClientError) as e:
            client.step({"obs": OBS, "comment": "x" * 1000})
        assert e.value.status == 413


def outside_count(server):
    return server.call(server.service.numbers)['bray_model_outside_total{model="m"}']


OUTSIDE = [0.0, 0.0, 3.0, 0.0]  # an angle of CartPole is at most 0.42


def test_observations_outside_their_space_are_counted_and_logged_once(cartpole, caplog):
    with serving({"m": cartpole}) as server, bray.Client(port=server.port) as client:
        client.start()
        client.tick({"obs": OBS})
        assert outside_count(server) == 0
        for _ in range(20):
            assert client.tick({"obs": OUTSIDE})["action"] in (0, 1)
        assert outside_count(server) == 20
        lines = [r.getMessage() for r in caplog.records if "outside their space" in r.getMessage()]
        assert len(lines) == 1
        assert "obs: 3 is not from -0.41" in lines[0]


def test_observations_outside_their_space_may_be_refused_or_let_through(cartpole):
    with serving({"m": cartpole}, check_obs="refuse") as server, bray.Client(port=server.port) as client:
        client.start()
        with pytest.raises(ClientError, match=r"obs: 3 is not from -0\.41") as e:
            client.tick({"obs": OUTSIDE})
        assert (e.value.status, e.value.code) == (400, "malformed")
        assert client.tick({"obs": OBS})["action"] in (0, 1)
    with serving({"m": cartpole}, check_obs="off") as server, bray.Client(port=server.port) as client:
        client.start()
        assert client.tick({"obs": OUTSIDE})["action"] in (0, 1)
        assert outside_count(server) == 0


# --- other policies ---------------------------------------------------------------------------------------------------


def test_a_memory_belongs_to_its_session(tmp_path):
    """Two sessions of a recurrent policy, interleaved, equal two alone; a new session starts with an empty memory."""
    path = train(tmp_path / "r", run="PPO", env="CartPole-v1", use_lstm=True, lstm_cell_size=8, fcnet_hiddens=[16])
    export_graph(path)
    exp = Experiment.load(path)
    obs = some_obs(30)

    def alone(rows):
        state, out = None, []
        for x in rows:
            action, state = exp.policy(x, state)
            out.append(int(action))
        return out

    with serving({"m": path}) as server, bray.Client(port=server.port) as a, bray.Client(port=server.port) as b:
        a.start()
        b.start()
        got_a, got_b = [], []
        for x, y in zip(obs[:15], obs[15:], strict=True):
            got_a.append(a.tick({"obs": x.tolist()})["action"])
            got_b.append(b.tick({"obs": y.tolist()})["action"])
        assert got_a == alone(obs[:15])
        assert got_b == alone(obs[15:])
        a.end()
        a.start()
        assert [a.tick({"obs": x.tolist()})["action"] for x in obs[15:]] == got_b


def test_continuous_actions_and_normalised_observations(tmp_path):
    small = {"learning_starts": 64, "fcnet_hiddens": [16, 16], "batch_size": 16}
    exp = Experiment(run="SAC", env="Pendulum-v1", path=tmp_path / "sac", use_preset=False, **small)
    for _ in exp.train(stop={"env_steps_total": 100}):
        pass
    ppo = train(tmp_path / "ppo", run="PPO", env="Pendulum-v1", normalize_observations=True)
    for run in (tmp_path / "sac", ppo):
        export_graph(run)
        policy = Experiment.load(run)
        with serving({"m": run}) as server, bray.Client(port=server.port) as client:
            client.start()
            for x in np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32):
                np.testing.assert_allclose(
                    client.tick({"obs": x.tolist()})["action"], policy.policy(x), rtol=1e-4, atol=1e-5
                )


def test_a_memory_and_continuous_actions(tmp_path):
    """No choices, so no mask lies between the observation and the state."""
    path = train(tmp_path / "r", run="PPO", env="Pendulum-v1", use_lstm=True, lstm_cell_size=8, fcnet_hiddens=[16])
    export_graph(path)
    exp, state = Experiment.load(path), None
    with serving({"m": path}) as server, bray.Client(port=server.port) as client:
        client.start()
        for x in np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32):
            action, state = exp.policy(x, state)
            np.testing.assert_allclose(client.tick({"obs": x.tolist()})["action"], action, rtol=1e-4, atol=1e-5)


def test_a_mask_in_the_parts_of_a_composite_action(tmp_path):
    (tmp_path / "composite_game.py").write_text(COMPOSITE)
    sys.path.insert(0, str(tmp_path))
    try:
        path = train(tmp_path / "r", run="PPO", env="composite_game:Game")
    finally:
        sys.path.remove(str(tmp_path))
    export_graph(path)
    kind, units = [0, 0, 1], [1, 0, 0, 1, 0]
    flat = kind + units
    raw = {"base64": base64.b64encode(np.array(flat, np.uint8).tobytes()).decode(), "dtype": "uint8"}
    with serving({"m": path}) as server, bray.Client(port=server.port) as client:
        client.start()
        # what an object means does not depend on the order of its keys
        for mask in (flat, raw, {"kind": kind, "units": units}, {"units": units, "kind": kind}):
            action = client.tick({"obs": [0.0, 0.0], "action_mask": mask})["action"]
            assert (action["kind"], action["units"]) == (2, [0, 1]), mask
            assert len(action["move"]) == 2
        for mask in ({"kind": kind}, {"kind": units, "units": kind}, flat[:-1], [0] * 8, 1, [kind, units], "x" * 8):
            with pytest.raises(ClientError, match="action_mask") as e:
                client.tick({"obs": [0.0, 0.0], "action_mask": mask})
            assert e.value.status == 400


COMPOSITE = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces

class Game(gym.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Dict(
        kind=spaces.Discrete(3), move=spaces.Box(-2, 2, (2,), np.float32), units=spaces.MultiDiscrete([2, 3])
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}
"""


def test_rules_equal_the_policies():
    """What acts without torch acts as the algorithm does."""
    from bray.algos import a2c, dqn, ppo, sac

    rng = np.random.default_rng(0)
    discrete = EnvSpec("d", Space("box", (3,)), Space("discrete", (), "int64", n=(5,), start=(2,)))
    box = EnvSpec("b", Space("box", (3,)), Space("box", (2,), "float32", -2.0, 2.0))
    for algo, spec, key, width in [
        (ppo, discrete, "dist", 5),
        (a2c, discrete, "dist", 5),
        (ppo, box, "dist", 4),
        (dqn, discrete, "q", 5),
        (sac, box, "dist", 4),
    ]:
        policy = algo.Policy(algo.Config(), spec)
        outputs = {key: rng.normal(size=(64, width)).astype(np.float32)}
        mask = rng.random((64, 5)) < 0.6
        mask[:, 0] = True
        obs = {"action_mask": mask} if spec is discrete else np.zeros((64, 3))
        for seed in (None, 3):

            def make(seed=seed):
                return None if seed is None else np.random.default_rng(seed)

            mode = "greedy" if seed is None else "sample"
            expected, _ = policy.act(outputs, act.Tick(obs), make(), mode, act.TRAINED)
            rule = act.make_rule(policy.rule.name, policy.rule.trained())  # as policy.json says it
            flat = rule.choose(spec.layout, outputs, mask if spec is discrete else None, make(), act.TRAINED)["action"]
            np.testing.assert_array_equal(spec.layout.to_env(flat), expected)
            tick = act.Tick(np.zeros((64, 3)), mask=mask if spec is discrete else None)  # a mask beside the observation
            got, _ = act.Policy(spec.layout, rule).act(outputs, tick, make(), mode, act.TRAINED)
            np.testing.assert_array_equal(got, expected)


def test_a_policy_of_ones_own_needs_torch(tmp_path, monkeypatch):
    """A Policy that acts its own way is not taken for the one it is derived from."""
    (tmp_path / "contrary.py").write_text(
        "from bray.algos.ppo import *\n"
        "from bray.algos import ppo\n"
        "class Policy(ppo.Policy):\n"
        "    def act(self, outputs, tick, rng, mode, clock):\n"
        "        action, extras = super().act(outputs, tick, rng, mode, clock)\n"
        "        return (action * 0 + 1), extras\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = train(tmp_path / "own", run="contrary:", env="CartPole-v1")
    assert json.loads((path / "policy.json").read_text())["rule"] is None
    with pytest.raises(ConfigError, match="--engine torch"), serving({"m": path}):
        pass
    with serving({"m": path}, engine="torch") as server, bray.Client(port=server.port) as client:
        client.start()
        assert {client.tick({"obs": x.tolist()})["action"] for x in some_obs(20)} == {1}


# --- versions ---------------------------------------------------------------------------------------------------------


def steps_of(run):
    return sorted(int(p.stem) for p in (run / "models" / "default").glob("*.safetensors"))


def test_versions_share_the_sessions(run):
    first, *_, last = steps_of(run)
    with serving({"m": run}, versions={str(first): 0.25, "latest": 0.75}) as server:
        counts = {first: 0, last: 0}
        for i in range(200):
            with bray.Client(port=server.port, session=f"s{i}") as client:
                version = client.start(data={})["version"]
                assert client.tick({"obs": OBS})["version"] == version
                counts[version] += 1
                client.end()
        assert 25 <= counts[first] <= 80
        with bray.Client(port=server.port, session="s0") as client:
            assert client.start(data={"version": first})["version"] == first
            assert client.tick({"obs": OBS})["version"] == first


def test_only_the_versions_that_were_asked_for_are_served(run):
    from bray.cli.serve import settings
    from bray.serving.config import parse_versions

    first = steps_of(run)[0]
    typed = ConfigSource("command line", {"model": {"versions": parse_versions([str(first)])}})
    assert settings([str(run)], typed)[2].versions == {str(first): 1.0}
    with serving({"m": run}, versions={str(first): 1.0}) as server:
        assert [v["label"] for v in admin(server, "/models")[0]["versions"]] == [str(first)]
        for i in range(10):
            with bray.Client(port=server.port, session=f"s{i}") as client:
                assert client.start(data={})["version"] == first


def test_rolling_back_twice_goes_further_back(run):
    start, first, second, last = steps_of(run)
    assert start == 0  # what it knew before the first step
    with serving({"m": run}) as server:
        steps = [admin(server, "/models/m", {"rollback": True})[0]["pinned"] for _ in range(3)]
        assert steps == [second, first, start]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            admin(server, "/models/m", {"rollback": True})
        assert admin(server, "/models/m", {"pin": None})[0]["versions"][0]["step"] == last


def test_rolling_back_a_pin_serves_what_was_served_before_it(run):
    _, first, second, last = steps_of(run)
    with serving({"m": run}) as server:

        def rolled_back():
            return admin(server, "/models/m", {"rollback": True})[0]["pinned"]

        admin(server, "/models/m", {"pin": second})
        admin(server, "/models/m", {"pin": first})
        assert [rolled_back(), rolled_back()] == [second, last]
        assert rolled_back() == second  # nothing was served before: the next older one
        admin(server, "/models/m", {"versions": {str(last): 1.0}})
        (run / "models" / "default" / f"{second}.safetensors").unlink()
        assert rolled_back() == first  # the one that was served is gone
        admin(server, "/models/m", {"pin": None})
        assert rolled_back() == first


def point(run, step):
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").symlink_to(str(step))


def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_the_version_before_stays_for_rolling_back(run):
    _, first, second, last = steps_of(run)
    point(run, first)
    with serving({"m": run}, follow=True, follow_every_s=0.02) as server:

        def loaded():
            return admin(server, "/models")[0]["loaded"]

        for step, held in ((second, [first, second]), (last, [second, last])):
            point(run, step)
            until(lambda held=held: loaded() == held)
        marks = {int(p.stem) for p in (run / "models" / "default").glob("*.keep")}
        assert marks == {second, last}
        assert admin(server, "/models/m", {"rollback": True})[0]["pinned"] == second
    assert not list((run / "models" / "default").glob("*.keep"))


def test_a_broken_run_does_not_hold_up_the_others(run, tmp_path):
    first, *_, last = steps_of(run)
    other = Path(shutil.copytree(run, tmp_path / "other", symlinks=True))
    for path in (run, other):
        point(path, first)
    with serving({"broken": run, "good": other}, follow=True, follow_every_s=0.02) as server:
        (run / "checkpoints" / "latest").unlink()
        (run / "checkpoints" / "latest").symlink_to("no number")
        time.sleep(0.1)
        point(other, last)
        until(lambda: admin(server, "/models")[1]["versions"][0]["step"] == last)
        assert admin(server, "/models")[0]["versions"][0]["step"] == first


def test_pin_and_roll_back_while_a_session_runs(run):
    *_, before, last = steps_of(run)
    exp = {step: Experiment.load(run, step) for step in (before, last)}
    with serving({"m": run}, follow_every_s=0.05) as server, bray.Client(port=server.port) as client:
        client.start()
        assert client.tick({"obs": OBS})["version"] == last
        (model,) = admin(server, "/models/m", {"rollback": True})
        assert (model["pinned"], model["versions"][0]["step"]) == (before, before)
        answers = [client.tick({"obs": x.tolist()}) for x in some_obs(20)]
        assert {a["version"] for a in answers} == {before}
        assert [a["action"] for a in answers] == [exp[before].policy(x) for x in some_obs(20)]
        (model,) = admin(server, "/models", {"pin": None})
        assert client.tick({"obs": OBS})["version"] == last
        (model,) = admin(server, "/models", {"versions": {str(before): 1.0}})
        assert client.tick({"obs": OBS})["version"] == before
        time.sleep(1.0)
        assert admin(server, "/models")[0]["loaded"] == [before, last]  # the one to roll back to stays
        for wish in (
            {"pin": 123456},
            {"pin": "x"},
            {"versions": {}},
            {"versions": {"latest": -1}},
            {"other": 1},
            [],
            "x",
        ):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                admin(server, "/models", wish)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            admin(server, "/models/n", {"pin": last})
        assert client.tick({"obs": OBS})["version"] == before


def test_new_checkpoints_are_followed_without_dropping_a_session(run):
    last = steps_of(run)[-1]
    with serving({"m": run}, follow=True, follow_every_s=0.05) as server, bray.Client(port=server.port) as client:
        client.start()
        assert client.tick({"obs": OBS})["version"] == last
        exp = Experiment.resume(run)
        for _ in exp.train(stop={"training_iteration": 5}):
            assert client.tick({"obs": OBS})["action"] in (0, 1)
        exp.close()
        newest = steps_of(run)[-1]
        deadline = time.monotonic() + 20
        while client.tick({"obs": OBS})["version"] != newest and time.monotonic() < deadline:
            time.sleep(0.05)
        answers = [client.tick({"obs": x.tolist()}) for x in some_obs(10)]
        assert {a["version"] for a in answers} == {newest}
        loaded = Experiment.load(run)
        assert [a["action"] for a in answers] == [loaded.policy(x) for x in some_obs(10)]


def test_a_broken_new_checkpoint_changes_nothing(run, caplog):
    last = steps_of(run)[-1]
    with serving({"m": run}, follow=True, follow_every_s=0.05) as server, bray.Client(port=server.port) as client:
        client.start()
        (run / "models" / "default" / "999999.safetensors").write_bytes(b"not weights")
        (run / "checkpoints" / "latest").unlink()
        (run / "checkpoints" / "latest").symlink_to("999999")
        time.sleep(0.5)
        assert client.tick({"obs": OBS})["version"] == last
        assert caplog.text.count("what is served stays as it is") == 1


def test_served_versions_are_kept_from_deletion_while_they_are_served(run):
    last = steps_of(run)[-1]
    mark = run / "models" / "default" / f"{last}.keep"
    with serving({"m": run}):
        assert mark.exists()
    assert not mark.exists()


def test_several_models(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other", symlinks=True))
    with serving({"a": run, "b": other}) as server, bray.Client(port=server.port) as client:
        assert client.start(data={})["model"] == "a"
        client.end()
        assert client.start(data={"model": "b"})["model"] == "b"
        assert client.tick({"obs": OBS})["action"] in (0, 1)
        client.end()
        with pytest.raises(ClientError, match="unknown model 'c'"):
            client.start(data={"model": "c"})
        assert [m["name"] for m in admin(server, "/models")] == ["a", "b"]


def test_names_of_models(tmp_path):
    (tmp_path / "x").mkdir()
    assert name_runs([tmp_path / "x", f"b={tmp_path / 'y'}"]) == {"x": tmp_path / "x", "b": tmp_path / "y"}
    with pytest.raises(ConfigError, match="two models are named 'x'"):
        name_runs([tmp_path / "x", f"x={tmp_path}"])


# --- deadlines, recordings --------------------------------------------------------------------------------------------


class SlowEngine:
    def __init__(self, engine):
        self.engine, self.slow = engine, True

    def forward(self, *args):
        if self.slow:
            time.sleep(1.0)
        return self.engine.forward(*args)


@pytest.mark.parametrize(("fallback", "expected"), [(1, {1}), ("random", {0, 1}), ("last", {0, 1})])
def test_a_fallback_when_the_deadline_passes(cartpole, fallback, expected):
    with serving({"m": cartpole}, fallback=fallback, tick_timeout_s=0.2) as server:
        with bray.Client(port=server.port) as client:
            client.start()
            first = client.tick({"obs": OBS})
            assert "fallback" not in first
            engine = server.service.models["m"].shares[0].version.engine
            slow = engine.engine = SlowEngine(engine.engine)
            late = client.tick({"obs": OBS})
            assert late["fallback"] is True
            assert late["action"] in expected
            assert fallback != "last" or late["action"] == first["action"]
            slow.slow = False
            time.sleep(1.2)
            assert client.tick({"obs": OBS}) == first
    with serving({"m": cartpole}, tick_timeout_s=0.2) as server, bray.Client(port=server.port) as client:
        client.start()
        engine = server.service.models["m"].shares[0].version.engine
        engine.engine = SlowEngine(engine.engine)
        with pytest.raises(ClientError) as e:
            client.tick({"obs": OBS})
        assert e.value.status == 504


def test_a_fallback_at_random_is_legal(cartpole):
    service = PolicyService({"m": cartpole}, ServedModelConfig(fallback="random"))
    actor = service.make_actor()
    actor.start("s", b"")
    for legal in (0, 1):
        mask = [int(i == legal) for i in (0, 1)]
        body = json.dumps({"obs": OBS, "action_mask": mask}).encode()
        assert {json.loads(actor.fallback(body))["action"] for _ in range(20)} == {legal}
    assert {json.loads(actor.fallback(b"nonsense"))["action"] for _ in range(60)} == {0, 1}


@pytest.mark.parametrize("fallback", [2, [0], "left", 0.5])
def test_a_fallback_that_is_no_action_is_refused(cartpole, fallback):
    with pytest.raises(ConfigError, match="fallback: expected"):
        PolicyService({"m": cartpole}, ServedModelConfig(fallback=fallback))


def test_stateless_requests_are_not_recorded(cartpole, tmp_path):
    with serving({"m": cartpole}, record=str(tmp_path / "rec")) as server, bray.Client(port=server.port) as client:
        assert client.step({"obs": OBS})["action"] in (0, 1)
        client.start("game")
        client.end()
    assert len(sorted((tmp_path / "rec").glob("*.rec"))) == 1


def test_record_and_replay(run, tmp_path, capsys):
    *_, before, last = steps_of(run)
    with serving({"m": run}, record=str(tmp_path / "rec")) as server, bray.Client(port=server.port) as client:
        for _ in range(2):
            client.start("game one")
            for x in some_obs(40):
                client.tick({"obs": x.tolist()})
            with contextlib.suppress(ClientError):
                client.tick(b"nonsense")  # refused, and not part of the recording
            client.end()
    files = sorted((tmp_path / "rec").glob("*.rec"))
    assert len(files) == 2
    about, steps = read_recording(files[0])
    assert (about.model, about.version, len(steps)) == ("m", last, 42)
    assert json.loads(steps[1].body)["obs"] == some_obs(40)[0].tolist()
    assert main(["replay", *map(str, files), "--against", str(last)]) == 0
    assert "80 of 80 actions are the same" in capsys.readouterr().out
    weights = bray.rundir.read_weights(run / "models" / "default" / f"{last}.safetensors")
    turned = {k: -v if "actor" in k or "dist" in k or "policy" in k or "heads" in k else v for k, v in weights.items()}
    bray.rundir.RunDir.open(run).save_weights(before + 1, turned)
    assert main(["replay", str(files[0]), "--against", str(before + 1), "--show", "2"]) == 0
    out = capsys.readouterr().out
    exp = Experiment.load(run, last)
    assert "40 of 40" not in out, (list(weights), [int(exp.policy(x)) for x in some_obs(40)])
    assert "then," in out
    broken = tmp_path / "broken.rec"
    broken.write_bytes(b"something else")
    assert main(["replay", str(broken)]) == 2
    assert "is not a recording" in capsys.readouterr().err
    broken.write_bytes(files[0].read_bytes()[:-3])  # cut off by a crash: read as far as it goes
    assert len(read_recording(broken)[1]) == 41  # all but the end


def test_a_recording_that_was_tampered_with_ends_in_one_message(cartpole, tmp_path, capsys):
    """What its frames hold was changed, and their checksums with it."""
    rng = random.Random(0)
    about = {"session": "s", "time": 0.0, "run": str(cartpole), "model": "m", "version": 1}
    steps = [(START, 0.0, b"", b"{}"), *[(TICK, 0.1, json.dumps({"obs": OBS}).encode(), b'{"action":1}')] * 3]
    frames = [msgspec.msgpack.encode(frame) for frame in (about, *steps)]
    path = tmp_path / "x.rec"
    codes = Counter()
    for _ in range(60):
        bad = [mutated(f, rng) if rng.random() < 0.3 else f for f in frames]
        path.write_bytes(recording_of(bad))
        codes[main(["replay", str(path)])] += 1
        assert "Traceback" not in capsys.readouterr().err
    assert set(codes) == {0, 2}


# --- files, errors ----------------------------------------------------------------------------------------------------


def test_runs_that_cannot_be_served(run, tmp_path):
    with pytest.raises(CheckpointError, match="no such run directory"):
        PolicyService({"m": tmp_path / "none"}, ServedModelConfig())
    with pytest.raises(CheckpointError, match="missing"):
        PolicyService({"m": run}, ServedModelConfig(versions={"123456": 1.0}))
    with pytest.raises(ConfigError, match="latest, best or a step"):
        PolicyService({"m": run}, ServedModelConfig(versions={"newest": 1.0}))
    with pytest.raises(ConfigError, match="shares above 0"):
        PolicyService({"m": run}, ServedModelConfig(versions={"latest": 0.0}))
    with pytest.raises(CheckpointError, match="bray export"):
        PolicyService({"m": run}, ServedModelConfig(engine="int8"))
    (run / "models" / "default" / "graph.onnx").write_bytes(b"garbage")
    with pytest.raises(bray.errors.DataError, match="ONNX"):
        PolicyService({"m": run}, ServedModelConfig())


def test_settings_on_the_command_line(capsys):
    from bray.cli.serve import settings

    nothing = ConfigSource("command line", {})
    typed = ConfigSource("command line", {"service": {"port": 9}, "model": {"act": "sample"}})
    runs, service, model = settings(["runs/a", "b=runs/c", "idle_timeout_s=5", "model.max_batch_size=8"], typed)
    assert runs == {"a": Path("runs/a"), "b": Path("runs/c")}
    assert (service.port, service.idle_timeout_s, service.actors_per_worker) == (9, 5.0, 1000)
    assert (model.act, model.max_batch_size) == ("sample", 8)
    assert settings(["r"], nothing)[2].act == "greedy"
    for words in (["r", "sample=true"], ["r", "model.sample=true"]):
        assert settings(words, nothing)[2].act == "sample"  # its name in 0.1
    for words, message in [
        ([], "missing argument"),
        (["port=1"], "expected a run directory"),
        (["r", "--versoin", "best"], "Did you mean '--version'"),
        (["r", "--version", "best=much"], "expected LABEL=SHARE"),
        (["r", "--fallback", "{oops"], "expected last, random or an action"),
        (["r", "service.max_bdy=3"], "Did you mean 'service.max_body'"),
        (["r", "workers=0"], "workers"),
        (["no/such/run"], "no such run directory"),
    ]:
        assert main(["serve", *words]) == 2, words
        assert message in capsys.readouterr().err, words


SERVE_WITHOUT_TORCH = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "gymnasium", "matplotlib", "tensorboard", "ray", "numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from bray.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def serve_process(*args):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE_WITHOUT_TORCH, "serve", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("serving"):
                process.port = int(line.split("127.0.0.1:")[1].split(",")[0])
                break
        else:
            raise AssertionError(process.stderr.read())
        process.admin_port = int(next(x for x in lines if "http://" in x).split("127.0.0.1:")[1].split("/")[0])
        yield process
    finally:
        process.kill()
        process.communicate()


def test_bray_serve_without_torch_in_two_workers(run):
    """The command, in an environment where torch, numba and the environment's package cannot be imported."""
    first, *_, last = steps_of(run)
    exp = {step: Experiment.load(run, step) for step in (first, last)}
    with serve_process(run, "--port", "0", "admin_port=0", "--workers", "2", "--tcp", "follow_every_s=0.1") as process:
        clients = [bray.Client(port=process.port, tcp=i % 2 == 1) for i in range(8)]
        for client in clients:
            client.start()
        for x in some_obs(5):
            assert {c.tick({"obs": x.tolist()})["action"] for c in clients} == {exp[last].policy(x)}
        admin(process, "/models", {"pin": first})  # told to one worker, done by both
        deadline = time.monotonic() + 20
        while {c.tick({"obs": OBS})["version"] for c in clients} != {first} and time.monotonic() < deadline:
            time.sleep(0.1)
        for x in some_obs(5):
            assert {c.tick({"obs": x.tolist()})["action"] for c in clients} == {exp[first].policy(x)}
        for client in clients:
            client.end()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def workers_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_worker_that_comes_back_serves_what_the_others_serve(run):
    """Not followed: a newer checkpoint changes nothing, also for a worker that was killed. Marks go with the
    service."""
    _, first, second, last = steps_of(run)
    point(run, second)
    with serve_process(run, "--port", "0", "admin_port=0", "--workers", "2", "follow_every_s=0.1") as process:

        def served():
            return {(m["versions"][0]["step"], m["pinned"]) for _ in range(12) for m in admin(process, "/models")}

        def metrics():
            with urllib.request.urlopen(f"http://127.0.0.1:{process.admin_port}/metrics", timeout=10) as reply:
                return dict(x.rsplit(" ", 1) for x in reply.read().decode().splitlines() if x[0] != "#")

        def replaced():
            now = workers_of(process)
            return len(now) == 2 and victim not in now and metrics()["bray_workers"] == "2"

        assert served() == {(second, None)}
        for worker in (0, 1):
            assert metrics()[f'bray_model_step{{model="run",worker="{worker}"}}'] == str(second)
        point(run, last)
        for step, pinned in ((second, None), (first, first)):
            if pinned is not None:
                admin(process, "/models/run", {"pin": pinned})
                until(lambda: served() == {(first, first)})
            victim = workers_of(process)[0]
            os.kill(victim, signal.SIGKILL)
            until(replaced)
            assert served() == {(step, pinned)}
        assert admin(process, "/models/run", {"pin": None})[0]["versions"][0]["step"] == last
        until(lambda: served() == {(last, None)})
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not list((run / "models" / "default").glob("*.keep"))


def test_mistakes_are_told_once_before_there_are_workers(run, capsys):
    for words, message in [
        (["no/such/run"], "no such run directory"),
        ([str(run), "--version", "7"], "step 7 are missing"),
        ([str(run), "--fallback", "5"], "fallback: expected"),
    ]:
        assert main(["serve", *words, "--workers", "2", "--port", "0"]) == 2
        assert capsys.readouterr().err.count(message) == 1
    (run / "policy.json").write_text('{"algorithm": "PPO"}')
    assert main(["serve", str(run)]) == 2
    assert "older Bray" in capsys.readouterr().err


def test_a_taken_port_leaves_nothing_behind(run):
    with serving({"m": run}) as server, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = Path(
            shutil.copytree(run, run.with_name("other"), symlinks=True, ignore=shutil.ignore_patterns("*.keep"))
        )
        with pytest.raises(ConfigError, match="cannot listen"), serving({"m": other}, port=taken.getsockname()[1]):
            pass
        assert not list((other / "models" / "default").glob("*.keep"))
        assert server.port


def test_commands_that_need_torch_say_so():
    code = [sys.executable, "-c", SERVE_WITHOUT_TORCH, "train", "--run", "PPO", "--env", "CartPole-v1"]
    done = subprocess.run(code, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "pip install '.[train]' in Bray's repository" in done.stderr
    assert "Traceback" not in done.stderr


def test_experiment_serve(tmp_path):
    exp = Experiment(
        run="PPO", env="CartPole-v1", path=tmp_path / "r", use_preset=False, num_envs=2, rollout_length=16, epochs=1
    )
    with pytest.raises(ConfigError, match="nothing to serve yet"):
        exp.serve(block=False)
    for _ in exp.train(stop={"training_iteration": 1}):
        pass
    with exp.serve(port=0, admin_port=0, block=False) as server, bray.Client(port=server.port) as client:
        client.start()
        assert client.tick({"obs": OBS})["action"] == exp.policy(np.float32(OBS))
    with pytest.raises(ConfigError, match="Did you mean 'act'"):
        exp.serve(port=0, block=False, atc="sample")
    exp.close()


def test_the_actor_alone(cartpole):
    """PolicyActor is an Actor like any other."""
    service = PolicyService({"m": cartpole}, ServedModelConfig())

    async def play():
        actor = service.make_actor()
        assert isinstance(actor, PolicyActor)
        actor.start("s", b"")
        reply = json.loads(await actor.tick(json.dumps({"obs": OBS}).encode()))
        await service.close()
        return reply

    assert asyncio.run(play())["action"] in (0, 1)
    assert ServiceConfig().port == 8000
