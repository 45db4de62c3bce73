"""Code written for the first Bray, as its pages and projects spell it: it runs, or is told the new spelling
(docs/moving.md)."""

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import bray
from bray import compat
from bray.cli.main import main
from bray.client import ClientError
from bray.errors import CheckpointError, ConfigError, MissingComponent
from bray.launch.build import build
from bray.launch.graph import load
from bray.rundir.weights import read_weights
from tests.ray_for_tests import local_session, opened  # noqa: F401
from tests.serving_for_tests import Wire, running


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(compat, "warned", set())


# --- names ------------------------------------------------------------------------------------------------------------


def test_old_modules_give_the_public_names(caplog):
    from bray.actor.agent import Agent, State
    from bray.buffer.utils import BatchBuffer
    from bray.metric import merge
    from bray.model.model import RemoteModel
    from bray.utils.nested_array import NestedArray, flatten_nested_array, make_batch, split_batch

    assert (Agent, State, BatchBuffer, merge) == (bray.Agent, bray.State, bray.BatchBuffer, bray.merge)
    assert (RemoteModel, NestedArray, make_batch) == (bray.RemoteModel, bray.NestedArray, bray.make_batch)
    batch = make_batch([{"a": np.zeros(2)}, {"a": np.ones(2)}])
    assert flatten_nested_array(batch)[0].shape == (2, 2)
    assert split_batch(batch)[1]["a"].tolist() == [1, 1]


def test_an_old_module_says_once_what_to_write(caplog):
    sys.modules.pop("bray.utils.nested_array", None)
    import bray.utils.nested_array

    assert bray.utils.nested_array.make_batch is bray.make_batch
    lines = [r.getMessage() for r in caplog.records if "bray.utils.nested_array" in r.getMessage()]
    assert lines == ["bray.utils.nested_array is of the first Bray; write the names of `import bray`"]


def test_a_module_that_never_was_is_missing_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'bray\.actors'"):
        import bray.actors  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Agnt'"):
        from bray.actor.agent import Agnt  # noqa: F401


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("export_onnx", "bray export RUN_DIR"),
        ("get_step", 'bray.RemoteModel("NAME").step'),
        ("TorchPrefetchBuffer", "bray.PrefetchBuffer"),
        ("RemoteModl", "Did you mean 'RemoteModel'"),
    ],
)
def test_a_name_that_is_gone_names_what_replaces_it(name, new):
    with pytest.raises(AttributeError) as e:
        getattr(bray, name)
    assert new in str(e.value)


def test_old_programs_are_commands_now():
    made = subprocess.run(
        [sys.executable, "-m", "bray.fake.fake_actor", "--help"], capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0
    assert "write `bray fake actor`" in made.stderr
    assert "--port" in made.stdout


def test_horovod_is_answered_with_the_lines_that_replace_it():
    with pytest.raises(ModuleNotFoundError) as e:
        import horovod.torch as hvd  # noqa: F401
    for line in (
        "import torch.distributed as dist",
        "dist.get_rank()",
        "dist.all_reduce(x)",
        "DistributedDataParallel",
    ):
        assert line in str(e.value)


# --- keywords ---------------------------------------------------------------------------------------------------------


def test_old_keywords_of_buffers(caplog):
    samples = [{"x": np.full(2, i)} for i in range(2)]
    assert bray.make_batch(samples, concate=True)["x"].tolist() == [0, 0, 1, 1]
    assert bray.make_batch(samples, concate=False)["x"].shape == (2, 2)
    (tensor,) = bray.TorchTensorBuffer([samples[0]["x"]], to_gpu=False)
    assert tensor.device.type == "cpu"
    assert len([r for r in caplog.records if "make_batch(concate=)" in r.getMessage()]) == 1  # said once
    assert "write kind='concate' or 'stack'" in caplog.text
    assert "write device='cuda' or 'cpu'" in caplog.text
    with pytest.raises(ConfigError, match="take the lengths before"):
        bray.make_batch(samples, concate=True, parts=[])


def test_old_keywords_of_a_trainer(caplog):
    assert bray.RemoteTrainer(framework="torch", total_cpus_ratio=0.75, num_workers=2).num_workers == 2
    assert "CPUs are asked for by number" in caplog.text
    with pytest.raises(ConfigError, match="PyTorch models only"):
        bray.RemoteTrainer(framework="tensorflow")


def test_old_keywords_of_an_agent_actor(caplog):
    class Quiet(bray.Agent):
        def on_tick(self, state):
            state.output = state.input

    actor = bray.AgentActor(name="a", Agents={"quiet": Quiet}, TickInput=None, episode_length=8)
    assert actor.tick is not None
    assert "write agents=" in caplog.text
    assert "write tick_input_proto=" in caplog.text


def test_old_keywords_of_a_model(local_session, caplog):  # noqa: F811
    net = torch.nn.Linear(3, 2)
    model = bray.RemoteModel("m", model=net, forward_args=(np.zeros(3, np.float32),), use_onnx=False)
    assert compat.translate("RemoteModel", {"use_onnx": True}) == {"use_onnx": "train"}  # an export takes seconds
    assert "write use_onnx='train'" in caplog.text
    assert model.get_model(step=-1).weight.shape == (2, 3)
    with pytest.raises(ConfigError, match=r"model\.clone\(7\)\.get_model\(\)"):
        model.get_model(step=7)


def test_old_spelling_of_query_and_path(local_session):  # noqa: F811
    bray.merge("loss", 2.0)
    assert bray.query("loss", kind="sum", time_window=True) == 2.0
    assert bray.query("loss", time_window=False) == 2.0
    assert bray.get_trial_launch_path() == str(local_session.path)
    assert bray.RemoteStateDumper("state") is None


def linear(**settings):
    return bray.RemoteModel("m", torch.nn.Linear(3, 2), (np.zeros(3, np.float32),), **settings)


def test_none_was_the_default_of_a_models_settings(local_session, caplog):  # noqa: F811
    nothing = dict.fromkeys(("num_workers", "max_batch_size", "cpus_per_worker", "memory_per_worker", "local_mode"))
    model = linear(**nothing, checkpoint_interval=None, use_onnx=None)
    assert model.num_workers == 0
    assert "RemoteModel(num_workers=) is of the first Bray; write num_workers=N: their number stays" in caplog.text


def test_old_calls_of_a_model(local_session, caplog):  # noqa: F811
    model = linear(max_batch_size=4)
    clone = model.clone(step=-1, max_batch_size=8, num_workers=2)
    assert clone.name == "m-0"
    assert "write RemoteModel(..., max_batch_size=) of the model" in caplog.text
    model.warmup()
    assert asyncio.run(as_coroutine(model.sync())) is None
    (x,), named = model.get_torch_forward_inputs()
    assert x.shape == (1, 3)
    assert named == {}
    bray.set_tensorboard_step(model=model)
    bray.set_tensorboard_step(model)
    for word in ("RemoteModel.warmup", "RemoteModel.sync", "get_torch_forward_inputs", "set_tensorboard_step(model=)"):
        assert f"{word} is of the first Bray" in caplog.text or f"RemoteModel.{word} is of the first" in caplog.text


async def as_coroutine(awaitable):
    return await awaitable


def test_old_calls_of_buffers(local_session, caplog):  # noqa: F811
    buffer = bray.RemoteBuffer("b", size=4, batch_size=1, num_workers=1)
    buffer.push({"x": np.ones(2)})
    assert next(buffer.iter_batches())["x"].shape == (1, 2)
    assert "RemoteBuffer.iter_batches is of the first Bray; write for batch in buffer" in caplog.text
    twice = bray.ReuseBuffer(iter([1, 2]))
    assert [next(twice) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert "what an iterator gives is kept in memory" in caplog.text
    assert [x for x, _ in zip(bray.ReuseBuffer([3]), range(2), strict=False)] == [3, 3]


def test_old_calls_of_metrics(local_session):  # noqa: F811
    from bray.metric.metric import merge_time_ms

    metric = bray.Metric("m")
    metric.merge(np.array([1.0, 3.0]))
    assert metric.avg == 2.0
    merge_time_ms("took", time.time() - 0.5, model="a")
    assert bray.query("took", model="a") >= 500


class Old(bray.AgentActor):
    """An AgentActor of a project's own, which ends its games as the first Bray spelled it."""

    def __init__(self):
        super().__init__(agents={"quiet": Quiet})
        self.stopped = []

    async def stop(self, data):
        self.stopped.append(await super().stop(data))
        return b"own"


class Quiet(bray.Agent):
    def on_tick(self, state):
        state.output = state.input


def test_an_agent_actor_may_be_stopped(caplog):
    with running(Old) as server, bray.Client(port=server.port) as client:
        client.start()
        client.tick(b"x")
        assert client.end() == b"own"
    assert "AgentActor.stop is of the first Bray; write AgentActor.end(data)" in caplog.text


class OnlyTicks(bray.Actor):
    """For games that send `auto`: the first Bray called nothing else for them."""

    def tick(self, data):
        return data

    def stop(self, data):
        raise AssertionError("nobody has started")


def test_a_request_without_a_session_needs_no_start_and_no_stop():
    with running(OnlyTicks) as server, Wire(server.port) as wire:
        assert wire.step("auto", None, b"x") == (200, b"x")


def test_a_torch_file_is_answered_with_how_to_convert_it(tmp_path):
    net = torch.nn.Linear(3, 2)
    torch.save(net.state_dict(), tmp_path / "step-100.pt")
    with pytest.raises(CheckpointError, match=r"step-100\.pt: a file of torch\.save is not read") as e:
        read_weights(tmp_path / "step-100.pt")
    code = re.search(r'python -c "(.*?)" and give', str(e.value))[1]
    exec(code)
    assert read_weights(tmp_path / "step-100.safetensors")["weight"].shape == (2, 3)


def test_a_list_of_weights_is_converted_as_the_page_says(tmp_path, monkeypatch):
    net = torch.nn.Linear(3, 2)
    torch.save([p.detach() for p in net.parameters()], tmp_path / "step-100.pt")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    exec(textwrap.dedent(code), {"torch": torch, "safetensors": safetensors, "model": net})
    assert read_weights(tmp_path / "start.safetensors")["weight"].tolist() == net.weight.tolist()


# --- the game service without an agent --------------------------------------------------------------------------------


def fake_actor(monkeypatch):
    """What `python -m bray.fake.fake_actor` serves, on any port."""
    served = []
    monkeypatch.setattr("bray.cli.fake.serve", lambda *args, **_: served.append(args) or 0)
    assert main(["fake", "actor", "--port", "0"]) == 0
    make, config = served[0]
    return running(make, use_tcp=config.use_tcp)


GAME = r"""
#include <arpa/inet.h>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <endian.h>
#include <string>
#include <sys/socket.h>
#include <unistd.h>

static std::string ask(int s, const std::string& session, const std::string& kind, const std::string& body) {
  const std::string key = "a key", token = "a token";
  const std::string parts[] = {session, kind, key, token, body};
  std::string sent;
  for (const auto& p : parts) { int64_t n = htobe64(p.size()); sent.append((char*)&n, 8); }
  sent.append(8, 0);  // time
  for (const auto& p : parts) sent += p;
  assert(send(s, sent.data(), sent.size(), 0) == (ssize_t)sent.size());
  int64_t head[3];
  assert(recv(s, head, 24, 0) == 24);
  assert(be64toh(head[0]) == session.size() && head[2] == 0);
  std::string name(be64toh(head[0]), ' '), answer(be64toh(head[1]), ' ');
  recv(s, &name[0], name.size(), 0);
  recv(s, &answer[0], answer.size(), 0);  // waits for ever where there is nothing
  assert(name == session);
  return answer;
}

int main(int, char** argv) {
  alarm(20);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(atoi(argv[1]));
  to.sin_addr.s_addr = inet_addr("127.0.0.1");
  int s = socket(AF_INET, SOCK_STREAM, 0);
  assert(connect(s, (sockaddr*)&to, sizeof to) == 0);
  puts(ask(s, "session_1", "start", "start game").c_str());
  for (int i = 0; i < 3; i++) puts(ask(s, "session_1", "tick", "state").c_str());
  puts(ask(s, "session_1", "stop", "stop game").c_str());
}
"""
"""A game over framed TCP as the first Bray's was: blocking calls, one `recv` for each part of a reply."""


def test_an_old_game_in_cpp_plays_against_a_fake_actor(monkeypatch, tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C++ compiler, or no endian.h")
    (tmp_path / "game.cpp").write_text(GAME)
    subprocess.run([compiler, "-O0", "-o", tmp_path / "game", tmp_path / "game.cpp"], check=True, timeout=120)
    with fake_actor(monkeypatch) as server:
        made = subprocess.run([tmp_path / "game", str(server.port)], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    ticks = ["fake_actor_tick_return"] * 3
    assert made.stdout.split() == ["fake_actor_start_return", *ticks, "fake_actor_end_return"]


def test_a_fake_actor_answers_http_as_well(monkeypatch):
    with fake_actor(monkeypatch) as server:
        for tcp in (False, True):
            with bray.Client(port=server.port, tcp=tcp) as client:
                assert client.start() == b"fake_actor_start_return"


def test_the_client_names_what_replaced_its_arguments():
    with pytest.raises(TypeError, match="there is no secret=: `token=` is what a service checks"):
        bray.Client("localhost", 8000, secret="s")
    with pytest.raises(TypeError, match=r"there is no actor=, .* serve it with bray\.RemoteActor"):
        bray.Client("localhost", 8000, actor=object())


# --- what is returned may be waited for with ray.get ------------------------------------------------------------------


def test_ray_get_takes_what_set_push_and_add_source_return(local_session):  # noqa: F811
    import ray

    running = ray.is_initialized()  # other files of this process may share one
    assert ray.get(bray.set("config", {"a": 1})) is None
    buffer = bray.RemoteBuffer("b", size=8, num_workers=1)
    assert ray.get(buffer.push({"x": np.zeros(2)})) is None
    assert ray.get([bray.push("b", {"x": np.ones(2)}), buffer.push({"x": np.ones(2)})]) == [None, None]
    ray.get(buffer.add_source([{"x": np.ones(2)}], num_workers=1), timeout=60)
    assert ray.is_initialized() == running
    assert bray.ray is ray


# --- a whole project --------------------------------------------------------------------------------------------------

PROJECT = {
    "__init__.py": "",
    "net.py": """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self, actions):
                super().__init__()
                self.body = nn.Linear(4, actions)

            def forward(self, state):
                logit = self.body(state["image"])
                return {"logit": logit, "action": torch.multinomial(torch.softmax(logit, -1), 1).squeeze(-1)}

        def build_model(name, config):
            network = config["network"]
            return Net(network["action_space"]), ({"image": torch.zeros(1, network["state_space"])},)
    """,
    "agents.py": """
        import numpy as np
        import bray
        from bray.actor.agent import State

        class Player(bray.Agent):
            def __init__(self, name, config, state):
                self.name = name

            async def on_tick(self, state: bray.State):
                image = np.asarray(state.input["image"], np.float32)
                outputs = await bray.forward("model1", {"image": image})
                logit, action = outputs["logit"], outputs["action"]
                reward = np.float32(state.input["reward"])
                state.transition = {"image": image, "logit": logit, "action": np.int64(action), "reward": reward}
                state.output = {"action": int(action)}

            async def on_episode(self, episode: list[State], done: bool):
                bray.push("buffer1", *[s.transition for s in episode])

        class Metrics(bray.Agent):
            def __init__(self, name, config, state):
                self.logit = bray.Metric("logit", max_samples=16)

            async def on_tick(self, state):
                transition = await state.wait("transition")
                self.logit.merge(transition["logit"])
    """,
    "trainers.py": """
        import torch
        import bray

        class Trainer1(bray.Trainer):
            def __init__(self, name, config, model):
                self.model = model

            def handle(self, replay):
                return replay

            def loss(self, replay):
                logit = self.model({"image": replay["image"]})["logit"]
                loss = torch.nn.functional.cross_entropy(logit, replay["action"])
                bray.merge("imitation", loss)
                return loss
    """,
    "rl.yaml": """
        project: RUNS
        trial: v0
        mode: train
        dump_state: true
        model1: {kind: model, module: old_game.net, checkpoint_interval: null, checkpoint: null, max_batch_size: 4,
                 num_workers: 0, cpus_per_worker: 0.5, gpus_per_worker: 0.0, memory_per_worker: 1024, use_onnx: null,
                 local_mode: true, override_model: true, tensorboard_graph: true, tensorboard_step: true}
        buffer1: {kind: buffer, enable: train, size: 8, batch_size: 8, num_workers: 2, density: 100}
        agent1: {kind: agent, module: old_game.agents, class: Player}
        metrics: {kind: agent, module: old_game.agents, class: Metrics}
        actor1: {kind: actor, port: PORT, num_workers: 2, actors_per_worker: 10, cpus_per_worker: 1.0,
                 memory_per_worker: 512, use_tcp: false, use_gateway: node,
                 agents: [agent1, metrics], episode_length: 8, episode_save_interval: 1000, serialize: json}
        trainer1: {kind: trainer, enable: train, module: old_game.trainers, class: Trainer1, model: model1,
                   buffers: [buffer1], buffer_weights: [1.0], use_gpu: null, num_workers: null, cpus_per_worker: null,
                   batch_size: 1, batch_kind: concate, prefetch_size: 1, max_reuse: 1, learning_rate: null,
                   clip_grad_max_norm: 1.0, weights_publish_interval: 1, num_steps: 6}
        network: {kind: config, state_space: 4, action_space: 3}
    """,
}


def write_old_project(folder, port, package="old_game"):
    """One package per test of this process: modules are imported once."""
    (folder / package).mkdir()
    for file, text in PROJECT.items():
        text = textwrap.dedent(text).replace("RUNS", str(folder / "runs")).replace("PORT", str(port))
        (folder / package / file).write_text(text.replace("old_game", package))
    return folder / package / "rl.yaml"


def play_old_game(port, ticks, until=lambda: False):
    client = bray.Client("127.0.0.1", port)
    client.start()
    for i in range(ticks):
        body = json.dumps({"image": [0.1 * i, 0.0, 1.0, 0.5], "reward": 1.0})
        assert 0 <= json.loads(client._tick(body))["action"] < 3
        if until():
            return
    client.stop()


def test_a_project_of_the_first_bray_trains_from_its_launch_file(tmp_path):
    """Agents, model, trainer, buffer, launch file and game as such projects have them; nothing is edited."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    file = write_old_project(tmp_path, port)
    command = [sys.executable, "-m", "bray.launch", "--config", str(file), "--cluster", "local"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while run.poll() is None:
            with contextlib.suppress(ClientError):  # it begins or ends
                play_old_game(port, 24)
        said = run.stdout.read()
    finally:
        run.kill()
    assert run.returncode == 0, said
    rows = [json.loads(line) for line in (tmp_path / "runs/v0/result.jsonl").read_text().splitlines()]
    assert rows[-1]["learner_steps_total"] == 6, said
    assert {"imitation", "logit/p50", "logit/max"} <= set(rows[-1])
    assert "Traceback" not in said, said
    assert "Warning" not in said, said


def test_a_deployed_project_pushes_into_nothing(tmp_path, caplog):
    """Its agents push in a deployment too, where nobody trains and there is no buffer."""
    graph = load(write_old_project(tmp_path, 0, "old_deployed"), mode="deploy")
    caplog.set_level("INFO")
    session = bray.init(graph.settings.project, graph.settings.trial, cluster="local")
    try:
        port = build(graph, session).actors["actor1"].port
        for _ in range(2):
            play_old_game(port, 24)
        bray.RemoteBuffer("buffer1", size=8).push({"x": np.zeros(2)}).result(1)
        with pytest.raises(MissingComponent, match="there is no buffer 'bufer1'"):
            bray.push("bufer1", {"x": np.zeros(2)})
    finally:
        bray.shutdown()
    said = [r.getMessage() for r in caplog.records if "buffer1" in r.getMessage()]
    assert said == ["buffer buffer1 does not exist in this mode: what is pushed to it is dropped"]
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


class Answers(torch.nn.Module):
    """A dict, and an action that is drawn: what the first template's model returned."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 3)

    def forward(self, state):
        logits = self.body(state["image"])
        return {"logits": logits, "action": torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]}


class Untraceable(Answers):
    def forward(self, state):
        if torch.jit.is_tracing():
            raise RuntimeError("not while it is traced")
        return super().forward(state)


@pytest.mark.filterwarnings("error")
def test_the_graph_of_a_model_that_returns_a_dict(local_session):  # noqa: F811
    example = ({"image": torch.zeros(1, 4)},)
    bray.RemoteModel("m", Answers(), example, tensorboard_graph=True)
    bray.add_graph(Answers(), example[0])


def test_a_graph_that_cannot_be_drawn_ends_nothing(local_session, caplog, capsys):  # noqa: F811
    bray.RemoteModel("m", Untraceable(), ({"image": torch.zeros(1, 4)},), tensorboard_graph=True)
    said = "model m is not in TensorBoard: torch cannot draw the graph of Untraceable: not while it is traced"
    assert said in caplog.text
    assert capsys.readouterr().out == ""


def test_a_launch_that_is_checked_runs_its_models(tmp_path, capsys):
    for package, line, code, said in (
        ("old_fine", "", 0, "nothing was started"),
        (
            "old_graph",
            "assert not torch.jit.is_tracing(), 'no trace'",
            0,
            "torch cannot draw the graph of Net: no trace",
        ),
        ("old_wrong", "self.bdy", 2, "'Net' object has no attribute 'bdy'"),
    ):
        file = write_old_project(tmp_path, 0, package)
        net = file.parent / "net.py"
        net.write_text(net.read_text().replace("logit = self", f"{line}\n        logit = self"))
        assert main(["launch", "--config", str(file), "--check", "--cluster", "local"]) == code
        out, err = capsys.readouterr()
        assert said in " ".join((out + err).split())
        assert "Traceback" not in out


# --- components made inside an Actor ----------------------------------------------------------------------------------


class Maker(bray.Actor):
    """Makes what it needs by itself, as Actors of the first Bray do."""

    def __init__(self, model):
        self.model = model
        self.early = bray.RemoteBuffer("early", size=4, batch_size=2, num_workers=2)

    async def start(self, session, data):
        self.late = bray.RemoteBuffer("late", size=4, batch_size=2, num_workers=1)
        self.opponent = bray.RemoteModel(self.model).clone()
        return b"started"

    async def tick(self, data):
        out = await self.opponent.forward(np.ones(3, np.float32))
        await self.early.push({"x": out})
        self.late.push({"x": out})
        return b"%d" % self.opponent.step

    async def end(self, data):
        return b"ended"


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_buffers_and_clones_may_be_made_inside_an_actor(tmp_path, kind):
    with opened(tmp_path, kind):
        net = torch.nn.Linear(3, 2)
        model = bray.RemoteModel("m", model=net, forward_args=(np.zeros(3, np.float32),))
        model.publish_weights(net.state_dict(), step=5).result()
        service = bray.RemoteActor(port=0, num_workers=2, actors_per_worker=2)
        service.serve(Actor=Maker, model="m")
        clients = [bray.Client("127.0.0.1", service.port) for _ in range(2)]
        for client in clients:
            assert client.start() == b"started"
        assert [client.tick(b"") for client in clients for _ in range(2)] == [b"5"] * 4
        for name in ("early", "late"):
            assert bray.RemoteBuffer(name).pop(timeout=30)["x"].shape == (2, 2)
        for client in clients:
            client.end()


# --- docs/moving.md ---------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "moving.md").read_text()


def test_the_page_has_every_old_spelling():
    table = PAGE.partition("## Old and new")[2].partition("\n## ")[0]
    words = [key for keys in compat.KEYWORDS.values() for key in keys]
    words += [m for m in compat.MODULES if not any(other.startswith(m + ".") for other in compat.MODULES)]
    words += ["bray.train", "RemoteStateDumper", "get_trial_launch_path", "export_onnx", "get_step", "horovod"]
    words += [method.rpartition(".")[2] for method in compat.METHODS]
    words += ["merge_time_ms", "ReuseBuffer(iterator)", "ListBuffer", "TensorFlowTensorBuffer", "step_kind: auto"]
    words += ["TorchPrefetchBuffer", "get_metrics_worker", "unflatten_nested_array", "secret=", "actor=", "bray.ray"]
    assert [word for word in words if word not in table] == []


@pytest.mark.slow
def test_the_trainer_of_the_page_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "moved.py").write_text(code)
    made = subprocess.run(
        [sys.executable, "moved.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    assert sorted(p.stem for p in (tmp_path / "runs/moved/v1/models/m").glob("*.safetensors"))[-1] == "10"


def test_the_old_training_loop_is_translated(local_session):  # noqa: F811
    """As launch scripts call it: `train=bray.train`, handles by the old keywords, None for what is left to its
    default."""

    class Old(bray.Trainer):
        def __init__(self, name, config, model):
            self.model, self.name = model, config["own"]["name"]

        def loss(self, replay):
            return (self.model(replay["x"]) - replay["y"]).square().mean()

        def eval(self, replay):
            bray.merge("evaluated", 1)

    net = torch.nn.Linear(3, 2)
    model = bray.RemoteModel("m", model=net, forward_args=(np.zeros(3, np.float32),))
    bray.set("config", {"own": {"name": "t"}})
    buffers = {name: bray.RemoteBuffer(name, size=16, batch_size=2, num_workers=1) for name in ("b", "e")}
    for buffer in buffers.values():
        buffer.push(*[{"x": np.ones(3, np.float32), "y": np.ones(2, np.float32)} for _ in range(24)])
    end = bray.RemoteTrainer(name="t").train(
        train=bray.train,
        name="t",
        Trainer=Old,
        remote_model=model,
        remote_buffers={"b": buffers["b"]},
        buffer_weights=None,
        batch_size=1,
        batch_kind="concate",
        prefetch_size=None,
        max_reuse=None,
        clip_grad_max_norm=1.0,
        weights_publish_interval=1,
        num_steps=4,
        remote_eval_buffer=buffers["e"],
        eval_interval=2,
        eval_steps=1,
    )
    assert end.result(60)["model_step"] == 4
    assert bray.query("evaluated", "cnt") == 2
