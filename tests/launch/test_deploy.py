"""`mode: deploy` from the files of a run: the agents of a launch file play with what `bray serve` serves with, over
real sockets."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import bray
from bray.cli.main import main
from bray.client import ClientError
from bray.errors import CheckpointError, ConfigError
from bray.experiment import Experiment
from bray.launch.build import build
from bray.launch.deploy import find_deployed
from bray.launch.graph import load
from bray.rundir import RunDir
from bray.service import PolicyService
from bray.serving.background import BackgroundServer
from bray.serving.config import ServedModelConfig, ServiceConfig
from bray.serving.messages import message_class
from bray.serving.protocol import END, START, TICK
from bray.serving.record import read_recording
from template import gamecore
from template.agents.metrics_agent import MetricsAgent
from template.games.grid import GridEnv

ROOT = Path(__file__).parents[2]
RL = ROOT / "template" / "rl.yaml"
SHORT = [
    "buffer1.batch_size=128",
    "trainer1.num_steps=48",
    "trainer1.checkpoint_interval=16",
    "agent1.wait_s=1",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The project directory of a short training of the template's rl.yaml; its trial is `t`."""
    project = tmp_path_factory.mktemp("deploy")
    graph = load(RL, ["actor1.port=0", *SHORT], project=str(project), trial="t")
    run = build(graph, bray.init(str(project), "t", cluster="local"))
    games = gamecore.Games("grid", "127.0.0.1", run.actors["actor1"].port)
    threads = [threading.Thread(target=games.play, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    try:
        run.ends["trainer1"].result(timeout=240)
    finally:
        games.over.set()
        bray.shutdown()
        for thread in threads:
            thread.join(10)
    assert len(RunDir(project / "t").versions("model1")) >= 3
    return project


@pytest.fixture
def project(trained, tmp_path):
    """A copy that a test may change."""
    shutil.copytree(trained, tmp_path / "project", symlinks=True)
    return tmp_path / "project"


@pytest.fixture(scope="module", autouse=True)
def admin_token():
    """Changes at the admin port need one; services read it from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRAY_ADMIN_TOKEN", "for-tests")
        yield


def admin(port, path="/models", wish=None):
    data = None if wish is None else json.dumps(wish).encode()
    headers = {"Authorization": "Bearer for-tests"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


class Deployed:
    """A deployment in this process."""

    def __init__(self, run):
        self.run, self.actor = run, run.actors["actor1"]
        self.port, self.admin_port = self.actor.port, self.actor.admin_port

    def admin(self, path="/models", wish=None):
        return admin(self.admin_port, path, wish)

    @property
    def service(self):
        return self.run.deployments["actor1"].service


@contextlib.contextmanager
def deployed(project, *keys, file=RL, trial="t", cluster="local", **kwargs):
    graph = load(file, ["actor1.port=0", *keys], mode="deploy", project=str(project), trial=trial)
    session = bray.init(str(project), trial, cluster=cluster, **kwargs)
    try:
        yield Deployed(build(graph, session))
    finally:
        bray.shutdown()


def steps(project):
    return RunDir(project / "t").steps()


def some_obs(n=60, seed=0):
    """What games look like that are played at random."""
    env, rng, out = GridEnv(), np.random.default_rng(seed), []
    obs, over = env.reset(seed=seed)[0], False
    while len(out) < n:
        out.append(obs)
        obs, _, terminated, truncated, _ = env.step(int(rng.integers(4)))
        over = terminated or truncated
        if over:
            obs, _ = env.reset()
    return out


def tick(obs, **more):
    return {"obs": gamecore.array(obs), "reward": 0.0, **more}


def answers(port, observations, name=None):
    """The replies of one session."""
    with bray.Client(port=port) as client:
        client.start(name)
        return [client.tick(tick(x)) for x in observations]


# --- what answers -----------------------------------------------------------------------------------------------------


def test_all_ways_to_act_agree(trained):
    """The deployed agent, `bray serve`, `exp.policy` and the rollout of `bray eval`, for the same observations."""
    exp = Experiment.load(trained / "t")
    rolled = []
    exp.play(
        episodes=2, num_envs=1, seed=5, on_step=lambda step: rolled.append((step.obs[0].copy(), int(step.action[0])))
    )
    observations = [*some_obs(), *(obs for obs, _ in rolled)]
    wanted = [int(exp.policy(x)) for x in observations]
    assert wanted[-len(rolled) :] == [action for _, action in rolled]
    with deployed(trained) as here:
        replies = answers(here.port, observations)
    assert [r["action"] for r in replies] == wanted
    assert {r["version"] for r in replies} == {steps(trained)[-1]}
    service = PolicyService({"m": trained / "t"}, ServedModelConfig())
    with BackgroundServer(service.make_actor, ServiceConfig(port=0, admin_port=0), service.prepare) as server:
        assert [r["action"] for r in answers(server.port, observations)] == wanted


def test_other_agents_see_what_the_model_said(trained):
    """The template's MetricsAgent waits for `outputs`, with the value in it; States have what they have in training."""
    states = []
    with deployed(trained, "actor1.episode_length=4") as here:
        watched = MetricsAgent.on_episode

        async def on_episode(self, episode, done):
            states.extend(episode)
            await watched(self, episode, done)

        MetricsAgent.on_episode = on_episode
        try:
            with bray.Client(port=here.port) as client:
                client.start()
                for x in some_obs(8):
                    client.tick(tick(x))
                client.end()
        finally:
            MetricsAgent.on_episode = watched
        assert bray.query("agent/value") is not None
        assert bray.query("agent/entropy") > 0
    assert len(states) == 8
    exp = Experiment.load(trained / "t")
    for state in states:
        assert set(state.outputs) == {"dist", "value"}
        assert int(state.action) == int(np.argmax(state.outputs["dist"])) == int(exp.policy(state.obs))
        assert set(state.extras) >= {"action", "logp"}
        assert state.version == steps(trained)[-1]


def test_sampling_draws_and_greedy_does_not(trained):
    with deployed(trained, "agent1.act=sample") as here:
        sampled = {r["action"] for r in answers(here.port, some_obs(1) * 60)}
    with deployed(trained) as here:
        greedy = {r["action"] for r in answers(here.port, some_obs(1) * 20)}
    assert len(greedy) == 1
    assert len(sampled) > 1


def test_messages_of_the_projects_own(trained):
    """`observe` and `answer` of the template's Agent1 speak protobuf; so does the fallback."""
    kinds = [
        message_class({"file": str(RL.parent / "tick.proto"), "message": m}, m) for m in ("TickInput", "TickOutput")
    ]
    exp = Experiment.load(trained / "t")
    keys = ["actor1.serialize=proto", "actor1.fallback=3", "actor1.tick_timeout_s=3"]
    with deployed(trained, *keys) as here, bray.Client(port=here.port) as client:
        client.start()
        for x in some_obs(20):
            reply = kinds[1].FromString(client.tick(kinds[0](obs=x.tobytes()).SerializeToString()))
            assert reply.action == exp.policy(x)
        engine = here.service.models["model1"].shares[0].version.engine
        engine.engine = Slow(engine.engine)
        assert kinds[1].FromString(client.tick(kinds[0](obs=x.tobytes()).SerializeToString())).action == 3


def test_a_malformed_tick_is_refused_and_the_session_goes_on(trained):
    with deployed(trained) as here, bray.Client(port=here.port) as client:
        client.start()
        with pytest.raises(ClientError, match="expected"):
            client.tick({"obs": [1, 2]})
        assert client.tick(tick(some_obs(1)[0]))["action"] in range(4)


def test_a_mask_forbids_actions(trained):
    with deployed(trained, "actor1.fallback=random", "actor1.tick_timeout_s=3") as here:
        with bray.Client(port=here.port) as client:
            client.start()
            x = some_obs(1)[0]
            for legal in range(4):
                mask = [int(i == legal) for i in range(4)]
                assert client.tick(tick(x, action_mask=mask))["action"] == legal
            engine = here.service.models["model1"].shares[0].version.engine
            engine.engine = Slow(engine.engine)
            late = client.tick(tick(x, action_mask=[0, 0, 1, 0]))
            assert (late["action"], late["fallback"]) == (2, True)


def test_a_memory_belongs_to_its_session_and_its_episode(tmp_path):
    """Two sessions at once, with an end of an episode in between, answer as `bray serve` does."""
    exp = Experiment(
        run="PPO", env="CartPole-v1", path=tmp_path / "run", use_preset=False, num_envs=2, rollout_length=16,
        use_lstm=True, seed=3
    )  # fmt: skip
    for _ in exp.train(stop={"training_iteration": 2}):
        pass
    exp.close()
    file = write_serve(tmp_path, tmp_path / "run")
    rng = np.random.default_rng(0)
    sessions = [
        [{"obs": x.tolist(), "terminated": i == 12} for i, x in enumerate(rng.normal(size=(25, 4)))] for _ in "ab"
    ]

    def play(port):
        with bray.Client(port=port) as a, bray.Client(port=port) as b:
            a.start()
            b.start()
            return [(a.tick(x), b.tick(y)) for x, y in zip(*sessions, strict=True)]

    with deployed(tmp_path / "p", "agent1.act=greedy", file=file, trial="other") as here:
        got = play(here.port)
        memory = here.service.models["model1"].initial_state
        assert memory is not None
    service = PolicyService({"m": tmp_path / "run"}, ServedModelConfig())
    with BackgroundServer(service.make_actor, ServiceConfig(port=0, admin_port=0), service.prepare) as server:
        assert play(server.port) == got


# --- versions ---------------------------------------------------------------------------------------------------------


def test_pin_and_roll_back(project):
    first, *_, before, last = steps(project)
    exp = {step: Experiment.load(project / "t", step) for step in (before, last)}
    with deployed(project) as here, bray.Client(port=here.port) as client:
        (model,) = here.admin()
        assert (model["name"], model["versions"]) == ("model1", [{"label": "latest", "step": last, "share": 1.0}])
        client.start()
        x = some_obs(1)[0]
        assert client.tick(tick(x)) == {"action": int(exp[last].policy(x)), "version": last}
        here.admin("/models/model1", {"pin": first})
        assert client.tick(tick(x))["version"] == first
        here.admin("/models/model1", {"pin": None})
        assert client.tick(tick(x))["version"] == last
        here.admin("/models/model1", {"rollback": True})
        assert client.tick(tick(x)) == {"action": int(exp[before].policy(x)), "version": before}
        assert here.admin()[0]["pinned"] == before
        assert RunDir(project / "t").is_protected(before, "model1")
    assert not list((project / "t" / "models").rglob("*.keep"))


def test_versions_share_the_sessions(project):
    first, *_, last = steps(project)
    with deployed(project, f"model1.versions={{latest: 0.75, '{first}': 0.25}}") as here:
        seen = [answers(here.port, some_obs(1), f"game{i}")[0]["version"] for i in range(200)]
        again = [answers(here.port, some_obs(1), f"game{i}")[0]["version"] for i in range(20)]
        here.admin("/models", {"versions": {"latest": 1.0}})
        assert {r["version"] for r in answers(here.port, some_obs(3), "game0")} == {last}
    assert seen[:20] == again  # a session belongs to a version by its name
    assert set(seen) == {first, last}
    assert 0.12 < seen.count(first) / 200 < 0.38


def test_a_step_as_the_checkpoint(project):
    first = steps(project)[0]
    with deployed(project, f"model1.checkpoint={first}") as here:
        assert {r["version"] for r in answers(here.port, some_obs(2))} == {first}


def point(run, step):
    """As a save does: `latest` becomes this step."""
    link = run.checkpoints / "moved"
    link.symlink_to(str(step))
    link.replace(run.checkpoints / "latest")


def test_new_checkpoints_are_followed(project, tmp_path):
    """Of a training in another trial."""
    first, *_, last = steps(project)
    run = RunDir(project / "t")
    point(run, first)
    keys = [f"model1.checkpoint={run.path}", "model1.follow=true"]
    with deployed(tmp_path / "other", *keys, trial="serves") as here, bray.Client(port=here.port) as client:
        client.start()
        assert client.tick(tick(some_obs(1)[0]))["version"] == first
        point(run, last)
        deadline = time.monotonic() + 20
        while client.tick(tick(some_obs(1)[0]))["version"] != last and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.tick(tick(some_obs(1)[0]))["version"] == last


# --- late ticks, recordings -------------------------------------------------------------------------------------------


class Slow:
    def __init__(self, engine):
        self.engine, self.slow = engine, True

    def forward(self, *args):
        if self.slow:
            time.sleep(5.0)
        return self.engine.forward(*args)


@pytest.mark.parametrize(("fallback", "expected"), [("3", {3}), ("last", None), ("random", set(range(4)))])
def test_a_late_tick_is_answered_with_the_fallback(trained, fallback, expected):
    with deployed(trained, f"actor1.fallback={fallback}", "actor1.tick_timeout_s=3") as here:
        with bray.Client(port=here.port) as client:
            client.start()
            x = some_obs(1)[0]
            first = client.tick(tick(x))
            assert "fallback" not in first
            engine = here.service.models["model1"].shares[0].version.engine
            slow = engine.engine = Slow(engine.engine)
            late = client.tick(tick(x))
            assert late["fallback"] is True
            assert late["version"] == first["version"]
            assert late["action"] in (expected or {first["action"]})
            slow.slow = False
            answers = (client.tick(tick(x)) for _ in range(20))  # the first ones may still wait for the slow forward
            assert next(a for a in answers if "fallback" not in a) == first


def test_without_a_fallback_a_late_tick_is_an_error(trained):
    with deployed(trained, "actor1.tick_timeout_s=3") as here, bray.Client(port=here.port) as client:
        client.start()
        client.tick(tick(some_obs(1)[0]))
        engine = here.service.models["model1"].shares[0].version.engine
        engine.engine = Slow(engine.engine)
        with pytest.raises(ClientError) as e:
            client.tick(tick(some_obs(1)[0]))
        assert e.value.status == 504


def test_a_fallback_that_is_no_action_is_refused(trained):
    with pytest.raises(ConfigError, match="fallback: expected"), deployed(trained, "actor1.fallback=7"):
        pass


def test_options_of_a_service_hold_in_a_deployment(project):
    """Those that `bray serve` has, by the same names."""
    about = json.loads((project / "t" / "spec.json").read_text())
    about["observation"]["high"] = 1
    (project / "t" / "spec.json").write_text(json.dumps(about))
    keys = ["actor1.check_obs=refuse", "actor1.max_wait_s=0.01", "actor1.threads=2", "actor1.max_queue=7"]
    with deployed(project, *keys) as here, bray.Client(port=here.port, retries=0) as client:
        config = here.service.models["model1"].config
        assert (config.max_wait_s, config.threads, config.max_queue) == (0.01, 2, 7)
        client.start()
        x = some_obs(1)[0] > 0
        assert client.tick(tick(x))["action"] in range(4)
        with pytest.raises(ClientError, match=r"400 malformed: .*obs: 3 is not from 0 to 1"):
            client.tick(tick(np.uint8(3) * x))
        assert client.tick(tick(x))["action"] in range(4)


def test_recordings_can_be_replayed(project, tmp_path, capsys):
    last = steps(project)[-1]
    with deployed(project, f"actor1.record={tmp_path / 'rec'}") as here:
        replies = answers(here.port, some_obs(), "one game")
    (file,) = (tmp_path / "rec").glob("*.rec")
    about, recorded = read_recording(file)
    assert (about.model, about.version, about.session) == ("model1", last, "one game")
    assert [s.kind for s in recorded] == [START, *[TICK] * len(replies), END]
    assert [json.loads(s.reply) for s in recorded if s.kind == TICK] == replies
    assert main(["replay", str(file)]) == 0
    assert f"{len(replies)} of {len(replies)} actions are the same" in capsys.readouterr().out


# --- which models -----------------------------------------------------------------------------------------------------

FROM_TRAIN = """
    project: PROJECT
    trial: other
    model1: {kind: model, checkpoint: RUN}
    agent1: {kind: agent, module: bray, class: PolicyAgent, model: model1}
    actor1: {kind: actor, port: 0, agents: [agent1], serialize: json}
"""


@pytest.fixture(scope="module")
def by_train(tmp_path_factory):
    """A run of `bray train`, on the same game."""
    path = tmp_path_factory.mktemp("train") / "run"
    exp = Experiment(
        run="PPO",
        env="template.games.grid:GridEnv",
        path=path,
        use_preset=False,
        num_envs=2,
        rollout_length=16,
        conv_filters=[[8, [3, 3], 1]],
        conv_features=16,
    )
    for _ in exp.train(stop={"training_iteration": 2}):
        pass
    exp.close()
    return path


def write_serve(folder, run):
    file = folder / "serve.yaml"
    file.write_text(textwrap.dedent(FROM_TRAIN).replace("PROJECT", str(folder / "p")).replace("RUN", str(run)))
    return file


def test_what_bray_train_made_is_deployed_by_a_launch_file(by_train, tmp_path):
    file = write_serve(tmp_path, by_train)
    exp = Experiment.load(by_train)
    with deployed(tmp_path / "p", file=file, trial="other") as here:
        assert [r["action"] for r in answers(here.port, some_obs())] == [int(exp.policy(x)) for x in some_obs()]
        assert here.admin()[0]["run"] == str(by_train)
    with pytest.raises(ConfigError, match="expected `module"):  # there is nothing to train
        load(file)
    with pytest.raises(
        ConfigError, match=r"model1.checkpoint \(.*\): nowhere cannot be deployed: nowhere is no run directory"
    ):
        find_deployed(load(file, ["model1.checkpoint=nowhere"], mode="deploy"))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["model1.use_onnx=null"], "use_onnx is null, which asks for PyTorch"),
        (["model1.num_workers=2", "model1.local_mode=false"], "num_workers is 2, which asks for processes of its own"),
        (["model1.checkpoint=weights.safetensors"], "weights.safetensors is no run directory"),
        (["agent1.class=Own", "agent1.module=own_agents"], "agent agent1 is no PolicyAgent"),
        (["metrics_agent.class=Names", "metrics_agent.module=own_agents"], "the code of metrics_agent names it"),
        (["model1.use_onnx=quantize"], "model.int8.onnx"),
    ],
)
def test_models_that_are_not_deployed_from_files(trained, tmp_path, monkeypatch, keys, reason):
    (tmp_path / "own_agents.py").write_text(
        "class Own:\n    def on_tick(self, state): ...\n\nclass Names(Own):\n    model = 'model1'\n"
        if "the code" in reason
        else "class Own:\n    def on_tick(self, state): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_agents", raising=False)
    monkeypatch.chdir(tmp_path)
    runs, reasons = find_deployed(load(RL, keys, mode="deploy", project=str(trained), trial="t"))
    assert runs == {}
    assert reason in reasons["model1"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda run: (run / "spec.json").unlink(),
            "has no spec.json: nothing was trained there yet, or by an older Bray",
        ),
        (lambda run: shutil.rmtree(run), "has no spec.json"),
        (lambda run: (run / "models" / "model1" / "graph.onnx").unlink(), "has no models/model1/graph.onnx"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint yet"),
        (lambda run: change_policy(run, rule=None), "acts in a way of its own"),
        (lambda run: change_policy(run, model="model2"), "says how to play with model2, not with model1"),
    ],
)
def test_runs_that_lack_something_are_deployed_as_before(project, change, reason):
    change(project / "t")
    graph = load(RL, [], mode="deploy", project=str(project), trial="t")
    runs, reasons = find_deployed(graph)
    assert runs == {}
    assert reason in reasons["model1"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: (run / "spec.json").unlink(), "has no spec.json"),
        (lambda run: change_policy(run, rule=None), "acts in a way of its own"),
    ],
)
def test_a_run_directory_that_cannot_be_deployed_is_a_mistake(project, change, reason):
    change(project / "t")
    keys = [f"model1.checkpoint={project / 't'}"]
    with pytest.raises(ConfigError, match=rf"model1.checkpoint \(.*command line\): .* cannot be deployed: .*{reason}"):
        find_deployed(load(RL, keys, mode="deploy", project=str(project), trial="x"))


def change_policy(run, **changes):
    policy = json.loads((run / "policy.json").read_text())
    (run / "policy.json").write_text(json.dumps(policy | changes))


def test_a_model_without_files_is_served_by_torch_with_one_line(tmp_path, caplog):
    with deployed(tmp_path) as here:
        assert not here.run.deployments
        reply = answers(here.port, some_obs(1))[0]
    assert reply["action"] in range(4)
    said = [r.getMessage() for r in caplog.records if "not from the files of a run" in r.getMessage()]
    assert len(said) == 1
    assert "has no spec.json" in said[0]


def test_training_deploys_nothing(trained):
    assert find_deployed(load(RL, [], project=str(trained), trial="t")) == ({}, {})


def test_agents_that_act_in_different_ways(trained, tmp_path):
    text = RL.read_text().replace("    - metrics_agent", "    - agent2")
    text += "\nagent2: {kind: agent, module: template.agents.agent1, class: Agent1, model: model1, act: sample}\n"
    file = tmp_path / "template" / "rl.yaml"
    file.parent.mkdir()
    file.write_text(text)
    _, reasons = find_deployed(load(file, [], mode="deploy", project=str(trained), trial="t"))
    assert reasons["model1"] == "the agents of actor1 act in different ways: agent1 greedy, agent2 sample"


def test_the_handle_of_a_deployed_model_and_the_config(trained):
    with deployed(trained) as here:
        assert here.run.models["model1"].step == steps(trained)[-1]
        assert (
            bray.get("config")["agent1"]["model"] == "model1"
        )  # the plain file; only the agents themselves have the model


def test_what_a_killed_deployment_kept_from_deletion_is_given_free(project):
    run, first = RunDir(project / "t"), steps(project)[0]
    run.protect(first, "model1")
    (run.path / "deploy").mkdir(exist_ok=True)
    (run.path / "deploy" / "marks").write_text(json.dumps([str(run.path), "model1", first]) + "\n")
    with deployed(project):
        assert not run.is_protected(first, "model1")
        assert run.is_protected(steps(project)[-1], "model1")
    assert not list(run.models.rglob("*.keep"))


# --- without torch ----------------------------------------------------------------------------------------------------

BLOCKED = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "gymnasium", "numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import os
open(os.path.join(os.path.dirname(__file__), f"blocked-{os.getpid()}"), "w").close()
"""


def test_a_deployment_on_an_open_port_has_every_protection(project, tmp_path, monkeypatch):
    """The launch keys of docs/security.md."""
    tls = Path(__file__).parents[1] / "files" / "tls"
    (tmp_path / "tokens").write_text("token-1\n")
    monkeypatch.chdir(tmp_path)
    keys = {
        "tls_cert": tls / "service.pem",
        "tls_key": tls / "service.key",
        "token_file": "tokens",
        "session_secrets": "true",
    }
    keys |= {f"max_{what}_per_address": n for what, n in (("connections", 20), ("sessions", 2), ("requests", 600))}
    x = some_obs(1)[0]
    with deployed(project, *(f"actor1.{key}={value}" for key, value in keys.items())) as here:

        def client(token="token-1"):
            return bray.Client(port=here.port, tls=str(tls / "service.pem"), token=token, session="g", retries=0)

        with client() as mine, client() as thief, client("token-2") as stranger:
            mine.start()
            assert "action" in mine.tick(tick(x))
            for other, code in ((thief, "bad_secret"), (stranger, "bad_token")):
                with pytest.raises(bray.client.ClientError, match=code):
                    other.tick(tick(x))
            thief.start("h")
            with pytest.raises(bray.client.ClientError, match="too_many_sessions"):
                client().start("i")
            thief.end()
            mine.end()


@contextlib.contextmanager
def launched(folder, *words):
    """`bray launch --mode deploy` of the template in an environment (its Ray workers too) without torch, numba and
    gymnasium."""
    (folder / "sitecustomize.py").write_text(BLOCKED)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "bray", "launch", "--config", str(RL), "--mode", "deploy", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "RAY_ADDRESS": "local",
             "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("games (actor1)"):
                process.port = int(line.split("port ")[1].split(";")[0])
            if line.startswith("admin"):
                process.admin_port = int(line.split("127.0.0.1:")[1].split("/")[0])
            if "Ctrl-C ends it" in line:
                break
        else:
            raise AssertionError("".join(lines))
        yield process
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, "".join(lines) + out
        assert "No module named" not in out
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("cluster", "gateway"),
    [("local", "node"), *(pytest.param("ray", g, marks=pytest.mark.slow) for g in ("node", "head"))],
)
def test_the_template_is_deployed_without_torch_and_gymnasium(project, tmp_path, cluster, gateway):
    (tmp_path / "site").mkdir()
    first, *_, last = steps(project)
    exp = {step: Experiment.load(project / "t", step) for step in (first, last)}
    words = ["--cluster", cluster, "--project", str(project), "--trial", "t", "actor1.port=0", "actor1.num_workers=2"]
    words.append(f"actor1.use_gateway={gateway}")
    with launched(tmp_path / "site", *words) as process:
        games = gamecore.Games("grid", "127.0.0.1", process.port)
        with bray.Client(port=process.port) as client:
            client.start()
            games.episode(client, GridEnv(), 1)
        assert games.episodes == 1
        with urllib.request.urlopen(f"http://127.0.0.1:{process.admin_port}/version", timeout=10) as reply:
            pid = json.loads(reply.read())["pid"]
        assert (
            tmp_path / "site" / f"blocked-{pid}"
        ).exists()  # torch is out of reach for the process that answers, too
        assert (pid == process.pid) is (cluster == "local")
        replies = answers(process.port, some_obs())
        assert [r["action"] for r in replies] == [int(exp[last].policy(x)) for x in some_obs()]
        admin(process.admin_port, wish={"pin": first})
        clients = [bray.Client(port=process.port) for _ in range(6)]  # on both workers
        for client in clients:
            client.start()
        deadline = time.monotonic() + 20
        x = some_obs(1)[0]
        while {c.tick(tick(x))["version"] for c in clients} != {first} and time.monotonic() < deadline:
            time.sleep(0.1)
        assert {(c.tick(tick(x))["version"], c.tick(tick(x))["action"]) for c in clients} == {
            (first, int(exp[first].policy(x)))
        }
        for client in clients:
            client.end()
            client.close()


# --- beside a training ------------------------------------------------------------------------------------------------


def test_a_deployment_runs_while_its_trial_is_trained_but_not_twice(project, tmp_path, capsys):
    holds = (
        f"import time; from bray.rundir import RunDir; RunDir.create({str(project / 't')!r}, resume=True); print(1, "
        "flush=True); time.sleep(300)"
    )
    training = subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, cwd=ROOT)
    (tmp_path / "site").mkdir()
    words = ["--cluster", "local", "--project", str(project), "--trial", "t", "actor1.port=0"]
    try:
        training.stdout.readline()
        before = {p: p.stat().st_mtime_ns for p in (project / "t").rglob("*") if p.is_file()}
        with launched(tmp_path / "site", *words) as process:
            assert answers(process.port, some_obs(3))
            assert main(["launch", "--config", str(RL), "--mode", "deploy", *words]) != 0
            assert "another process is serving here" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="another process is training here"):
            bray.init(str(project), "t", cluster="local")
        folder = project / "t" / "deploy"
        written = {p for p in (project / "t").rglob("*") if p.is_file() and p.stat().st_mtime_ns != before.get(p)}
        assert written
        assert all(folder in p.parents for p in written)
    finally:
        training.kill()
        training.communicate()


def test_a_game_chooses_its_version_at_the_start(project):
    first, *_, last = steps(project)
    exp = Experiment.load(project / "t", first)
    with deployed(project, f"model1.versions={{latest: 0.9, '{first}': 0.1}}") as here:
        with bray.Client(port=here.port) as client:
            client.start(data={"version": first})
            replies = [client.tick(tick(x)) for x in some_obs(20)]
            assert {r["version"] for r in replies} == {first}
            assert [r["action"] for r in replies] == [int(exp.policy(x)) for x in some_obs(20)]
        with (
            bray.Client(port=here.port) as client,
            pytest.raises(ClientError, match=f"expected one of the versions .*{last}"),
        ):
            client.start(data={"version": 123456})
        with bray.Client(port=here.port) as client:
            client.start(data={"level": 3, "version": "hard"})  # a word of the game's own
            assert client.tick(tick(some_obs(1)[0]))["version"] in (first, last)


# --- what it earns ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sampled_games_earn_what_they_earn_in_the_experiment(trained):
    """400 episodes each; the means agree within a 99 % interval of their difference."""
    exp = Experiment.load(trained / "t")
    here_returns = np.array([r for r, _ in exp.play(episodes=400, seed=1, act="sample")])
    env = GridEnv()
    with deployed(trained, "agent1.act=sample") as here, bray.Client(port=here.port) as client:
        games = gamecore.Games("grid", "127.0.0.1", here.port)
        client.start()
        totals = []
        for seed in range(400):
            games.episode(client, env, 50_000 + seed)
            totals.append(games.returns[-1])
    there = np.array(totals)
    chance = 2.576 * np.sqrt(here_returns.var(ddof=1) / 400 + there.var(ddof=1) / 400)
    assert abs(here_returns.mean() - there.mean()) < chance
