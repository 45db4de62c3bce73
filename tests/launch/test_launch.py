"""Launch files: what they mean, what is wrong with them, their schema and their picture. Nothing is started here."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jsonschema
import pytest
import yaml

from bray.cli.main import main
from bray.config import options
from bray.config.schema import rows
from bray.errors import ConfigError
from bray.launch.graph import Edge, load, total
from bray.launch.modules import check_modules, edges_in_code
from bray.launch.picture import svg
from bray.launch.schema import schema
from bray.launch.settings import KINDS, EvalSettings, Message

SL_RL = Path(__file__).parents[1] / "files" / "launch_sl_rl.yaml"
TEMPLATE = Path(__file__).parents[2] / "template"
DOCS = Path(__file__).parents[2] / "docs" / "launch.md"
SMALL = """\
project: p
trial: t
model1: {kind: model, module: m}
buffer1: {kind: buffer, enable: train}
agent1: {kind: agent, module: a, class: A}
actor1: {kind: actor, agents: [agent1]}
trainer1: {kind: trainer, enable: train, module: m, class: T, model: model1, buffers: [buffer1]}
"""
_number = itertools.count()


def write(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def loaded(tmp_path, text, *args, **kwargs):
    return load(write(tmp_path, text), *args, **kwargs)


def mistakes(tmp_path, text, *args, **kwargs):
    with pytest.raises(ConfigError) as e:
        loaded(tmp_path, text, *args, **kwargs)
    return str(e.value).replace(f"{tmp_path}/", "")


# --- what the file means ----------------------------------------------------------------------------------------------


def test_every_key_of_a_launch_file_has_its_value():
    graph = load(SL_RL)
    top = graph.settings
    assert (top.project, top.trial, top.mode, top.dump_state) == ("template", "train_sl_rl_v0", "train", True)
    plain = yaml.safe_load(SL_RL.read_text())
    for name, c in graph.components.items():  # every key that the file gives has its value, null means a default
        for key, value in plain[name].items():
            if c.kind == "config" and key != "kind":
                assert c.extra[key] == value
            elif key != "kind":
                got = getattr(c.settings, {"class": "class_"}.get(key, key))
                got = dataclasses.asdict(got) if dataclasses.is_dataclass(got) else got
                got = {k: v for k, v in got.items() if v is not None} if isinstance(got, dict) else got
                assert (list(got) if isinstance(got, tuple) else got) == value, (name, key)
    assert graph.components["trainer1"].settings.eval == EvalSettings(buffer="eval_buffer", interval=1000, steps=10)
    message = Message(message="TickInput", module="template.tick_pb2")
    assert graph.components["actor1"].settings.tick_input_proto == message
    assert graph.config == {**plain, "trust": False}
    assert graph.absent == {}
    assert graph.notes == ()


def test_a_launch_file_as_a_graph():
    assert set(load(SL_RL).edges) == {
        Edge("eval_source", "eval_buffer", "fills"),
        Edge("train_source", "train_buffer", "fills"),
        Edge("actor1", "agent1", "ticks"),
        Edge("actor1", "metrics_agent", "ticks"),
        Edge("train_buffer", "trainer1", "trains 50 %"),
        Edge("buffer1", "trainer1", "trains 50 %"),
        Edge("eval_buffer", "trainer1", "evaluates"),
        Edge("trainer1", "model1", "publishes"),
    }


def test_one_file_two_modes():
    graph = load(SL_RL, mode="deploy")
    assert set(graph.components) == {
        "model1", "agent1", "metrics_agent", "actor1", "render1", "action_render", "network",
    }  # fmt: skip
    assert set(graph.absent.values()) == {"enable: train"}
    assert (graph.settings.mode, graph.config["mode"]) == ("deploy", "deploy")
    assert "trainer1" in graph.config  # whoever reads the file sees all of it


@pytest.mark.parametrize(
    ("enable", "modes"),
    [("train", ["train"]), ("deploy", ["deploy"]), ("true", ["train", "deploy"]), ("null", ["train", "deploy"]),
     ("false", [])],
)  # fmt: skip
def test_enable(enable, modes, tmp_path):
    text = SMALL.replace("kind: model,", f"kind: model, enable: {enable},").replace("model: model1, ", "model: other, ")
    text += "other: {kind: model, module: m}\n"
    assert [m for m in ("train", "deploy") if "model1" in loaded(tmp_path, text, mode=m).components] == modes


def test_deploy_trains_nothing_even_when_nothing_says_so(tmp_path):
    text = SMALL.replace("enable: train, ", "").replace(", enable: train", "")
    text += "source1: {kind: source, module: s}\nbuffer2: {kind: buffer, sources: [source1]}\n"
    text = text.replace("[buffer1]}", "[buffer1], eval: {buffer: buffer2}}")
    assert set(loaded(tmp_path, text).components) > {"trainer1", "buffer1", "buffer2", "source1"}
    graph = loaded(tmp_path, text, mode="deploy")
    assert set(graph.components) == {"model1", "agent1", "actor1"}
    assert graph.absent == {
        "trainer1": "deploy mode trains nothing",
        "buffer1": "only trainers read it",
        "buffer2": "only trainers read it",
        "source1": "no buffer reads it",
    }
    asked = loaded(tmp_path, text.replace("{kind: buffer}", "{kind: buffer, enable: deploy}"), mode="deploy")
    assert "buffer1" in asked.components  # whoever says so wants it


def test_an_actor_goes_on_without_agents_of_the_other_mode(tmp_path):
    text = (
        SMALL.replace("[agent1]", "[agent1, metrics]") + "metrics: {kind: agent, enable: train, module: a, class: B}\n"
    )
    text = text.replace("class: A}", "class: A, model: model1, buffer: buffer1}")
    graph = loaded(tmp_path, text, mode="deploy")
    assert set(graph.edges) == {Edge("actor1", "agent1", "ticks"), Edge("model1", "agent1", "answers")}
    assert Edge("agent1", "buffer1", "pushes") in loaded(tmp_path, text).edges


def test_null_means_the_default_where_it_means_nothing_else(tmp_path):
    text = """\
        project: p
        trial: t
        mode: null
        dump_state: null
        m: {kind: model, module: m, max_batch_size: null, memory_per_worker: null, use_onnx: null}
        a: {kind: agent, module: a, class: A}
        x: {kind: actor, agents: [a], port: null, use_gateway: null, episode_length: null}
    """
    graph = loaded(tmp_path, text)
    assert (graph.settings.mode, graph.settings.dump_state) == ("train", False)
    m, x = graph.components["m"].settings, graph.components["x"].settings
    assert (m.max_batch_size, m.memory_per_worker, m.use_onnx) == (1, 1024, None)
    assert (x.port, x.use_gateway, x.episode_length) == (8000, None, None)
    assert (
        loaded(tmp_path, text.replace("port: null", "port: 9"), ["x.port=null"]).components["x"].settings.port == 8000
    )


def test_the_command_line_wins(tmp_path):
    keys = [
        "model1.max_batch_size=8",
        "trainer1.buffers=[buffer1, more]",
        "trainer1.eval.interval=5",
        "agent1.colour.hue=3",
    ]
    text = SMALL + "more: {kind: buffer}\n"
    text = text.replace("[buffer1]}", "[buffer1], eval: {buffer: more, interval: 7, steps: 2}}")
    text = text.replace("class: A}", "class: A, colour: {hue: 1, light: 2}}")
    graph = loaded(tmp_path, text, keys, mode="train", trial="t2", project="q")
    assert graph.components["model1"].settings.max_batch_size == 8
    assert graph.components["trainer1"].settings.buffers == ("buffer1", "more")
    assert graph.components["trainer1"].settings.eval == EvalSettings(buffer="more", interval=5, steps=2)
    assert graph.components["agent1"].extra == {"colour": {"hue": 3, "light": 2}}
    assert (graph.settings.project, graph.settings.trial) == ("q", "t2")
    assert graph.config["model1"] == {"kind": "model", "module": "m", "max_batch_size": 8}
    assert graph.config["agent1"]["colour"] == {"hue": 3, "light": 2}
    assert graph.config["trial"] == "t2"
    assert graph.where("model1", "max_batch_size") == "model1.max_batch_size=8 on the command line"
    assert graph.where("trainer1", "model") == f"{tmp_path / 'x.yaml'}:7"


def test_what_is_asked_of_the_cluster(tmp_path):
    text = (
        SMALL + "big: {kind: model, module: m, num_workers: 3, cpus_per_worker: 2, gpus_per_worker: 0.5, "
        "memory_per_worker: 100}\n"
    )
    text = text.replace("model1, buffers", "big, use_gpu: true, num_workers: 2, cpus_per_worker: 4, buffers")
    graph = loaded(tmp_path, text)
    asks = {a.name: a for a in graph.resources()}
    assert asks["model1"][1:5] == (0, 0.0, 0.0, 0)
    assert asks["big"][1:5] == (3, 6.0, 1.5, 300)
    assert asks["actor1"][1:5] == (2, 2.0, 0.0, 1024)
    assert asks["trainer1"][1:5] == (2, 8.0, 2.0, 0)
    assert total(asks.values())[1:5] == (9, 16.0, 3.5, 1324)
    assert total([])[1:5] == (0, 0, 0, 0)


def test_yaml_anchors_share_settings(tmp_path):
    text = "project: p\ntrial: t\na: &a {kind: buffer, size: 3}\nb: {<<: *a, batch_size: 2}\n"
    graph = loaded(tmp_path, text)
    assert (graph.components["b"].settings.size, graph.components["b"].settings.batch_size) == (3, 2)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("trial: t", ""), "x.yaml: expected `trial: NAME` at the top (or --trial NAME)"),
        (("project: p", "projct: p"),
         "projct (x.yaml:1): expected a component (projct: with `kind: ...` and its keys under it). Did you mean "
         "'project'?"),
        (("trial: t", "trial: t\nmode: trian"),
         "mode (x.yaml:3): expected 'train' or 'deploy', got 'trian'. Did you mean 'train'?"),
        (("kind: model", "kind: modle"), "unknown kind 'modle' (x.yaml:3, model1). Did you mean 'model'?"),
        (("kind: model", "knd: model"),
         "model1 (x.yaml:3): expected `kind: ...` under it: model, source, buffer, agent, actor, render, trainer, "
         "config. Did you mean that by 'knd'?"),
        (("module: m}", "module: m, max_batchsize: 3}"),
         "unknown key 'model1.max_batchsize' (x.yaml:3). Did you mean 'max_batch_size'?"),
        (("module: m}", "module: m, hidden: 3}"), "unknown key 'model1.hidden' (x.yaml:3). Known: algo, checkpoint, "),
        (("module: m}", "module: m, hidden: 3}"), "Settings of your own belong in a `kind: config` component."),
        (("module: m}", "module: m, num_workers: many}"),
         "model1.num_workers (x.yaml:3): expected a whole number >= 0, got 'many'"),
        (("module: m}", "module: m, use_onnx: trian}"),
         "model1.use_onnx (x.yaml:3): expected 'train', 'infer' or 'quantize' or null, got 'trian'. Did you mean "
         "'train'?"),
        (("{kind: model, module: m}", "{kind: model}"),
         "model1 (x.yaml:3): expected `module: ...` under it (or `algo: ...`)"),
        (("class: A}", "clas: A}"), "agent1 (x.yaml:5): expected `class: ...` under it"),
        (("class: T", "class_: T"), "unknown key 'trainer1.class_' (x.yaml:7). Did you mean 'class'?"),
        (("class: T", "class: 3"), "trainer1.class (x.yaml:7): expected text of length >= 1 or null, got 3"),
        (("model: model1", "model: modle1"),
         "trainer1.model (x.yaml:7): there is no model 'modle1'. Did you mean 'model1'?"),
        (("model: model1", "model: buffer1"),
         "trainer1.model (x.yaml:7): expected a model, 'buffer1' is a buffer. Known: model1."),
        (("[buffer1]", "\n  [buffer1,\n  bufer1]"),
         "trainer1.buffers (x.yaml:9): there is no buffer 'bufer1'. Did you mean 'buffer1'?"),
        (("[buffer1]", "[buffer1, buffer1]"), "trainer1.buffers (x.yaml:7): 'buffer1' is listed twice"),
        (("[buffer1]", "[]"), "trainer1.buffers (x.yaml:7): expected a list of texts of length >= 1, got []"),
        (("[buffer1]", "[buffer1], buffer_weights: [1, 2]"),
         "trainer1.buffer_weights (x.yaml:7): expected one weight for each of the 1 buffers (buffer1), got 2"),
        (("[buffer1]", "[buffer1], buffer_weights: [0]"),
         "trainer1.buffer_weights (x.yaml:7): expected a weight above 0, all are 0"),
        (("[buffer1]", "[buffer1], eval: {buffer: no}"),
         "trainer1.eval.buffer (x.yaml:7): there is no buffer 'no'. Known: buffer1."),
        (("[buffer1]", "[buffer1], eval: {interval: 3}"), "trainer1.eval (x.yaml:7): expected `buffer: ...` under it"),
        (("kind: buffer,", "kind: buffer, sources: [s],"),
         "buffer1.sources (x.yaml:4): there is no source 's'; the file has no source at all"),
        (("kind: buffer,", "kind: buffer, store: uniform,"),
         "buffer1.store (x.yaml:4): it is gone, a buffer is a queue: each sample is taken once, oldest first. An "
         "algorithm keeps its own replay: `settings: {replay_size: ..., prioritized: true}` of its section. A "
         "bray.Trainer keeps a bray.ReplayBuffer or a bray.PrioritizedBuffer"),
        (("kind: buffer,", "kind: buffer, max_reuse: 3,"),
         "buffer1.max_reuse (x.yaml:4): it is gone, a buffer is a queue"),
        (("kind: buffer,", "kind: buffer, batch_size: 2, store: uniform, pushed_per_sampled: [3, 1],"),
         "buffer1.pushed_per_sampled (x.yaml:4): it is gone, a buffer is a queue"),
        (("kind: buffer,", "kind: buffer, density: 200,"),
         "buffer1.density (x.yaml:4): expected a whole number >= 1 and <= 100, got 200"),
        (("class: A}", "class: A, model: modle1}"),
         "agent1.model (x.yaml:5): there is no model 'modle1'. Did you mean 'model1'?"),
        (("class: A}", "class: A, algo: ppo}"),
         "agent1.algo (x.yaml:5): there is no config 'ppo'; the file has no config at all"),
        (("agents: [agent1]", "agents: [agnt1]"),
         "actor1.agents (x.yaml:6): there is no agent 'agnt1'. Did you mean 'agent1'?"),
        (("agents: [agent1]", "port: 1"),
         "actor1 (x.yaml:6): expected `agents: [...]` under it, or an Actor class of your own"),
        (("agents: [agent1]", "agents: [agent1], module: m"),
         "actor1.agents (x.yaml:6): an actor has agents or a class of its own (module, class), not both"),
        (("agents: [agent1]", "module: m"), "actor1.module (x.yaml:6): expected `class: ...` beside it"),
        (("agents: [agent1]", "agents: [agent1], port: 99999"),
         "actor1.port (x.yaml:6): expected a whole number >= 0 and <= 65535, got 99999"),
        (("trainer1:", "actor2: {kind: actor, agents: [agent1]}\ntrainer1:"),
         "actor2.port (x.yaml:7): port 8000 is that of actor1 too (x.yaml:6): choose one that is free, or 0 for any"),
        (("trainer1:", "actor2: {kind: actor, port: 8001, agents: [agent1]}\ntrainer1:"),
         "actor2.port (x.yaml:7): port 8001 is that of actor1's metrics (x.yaml:6)"),
        (("trainer1:", "actor2: {kind: actor, port: 7999, agents: [agent1]}\ntrainer1:"),
         "actor2.port (x.yaml:7): port 8000 (the one after its own, for metrics) is that of actor1 too"),
        (("agents: [agent1]", "agents: [agent1], serialize: proto"),
         "serialize is proto: expected tick_input_proto with module and message"),
        (("agents: [agent1]", "agents: [agent1], tick_input_proto: {message: M}"),
         "actor1.tick_input_proto (x.yaml:6): expected either `module: ...` (made by protoc) or `file: ...` (a "
         ".proto file)"),
        (("enable: train, module", "enable: trin, module"),
         "trainer1.enable (x.yaml:7): expected 'train' or 'deploy' or true or false or null, got 'trin'. Did you "
         "mean 'train'?"),
        (("model1:", "model.1:"),
         "model.1 (x.yaml:3): expected a name of letters, digits, '_' and '-' that begins with a letter"),
        (("kind: buffer, enable: train", "kind: buffer, enable: false"),
         "trainer1.buffers (x.yaml:7): 'buffer1' does not exist in this mode (enable: false). Enable it, or take "
         "it (and its weight) out of this list."),
        (("class: A}", "class: A, enable: deploy}"),
         "actor1.agents (x.yaml:6): none of its agents exists in this mode: agent1 (enable: deploy)"),
        (("module: m}", "module: m, enable: deploy}"),
         "trainer1.model (x.yaml:7): 'model1' does not exist in this mode (enable: deploy)."),
    ],
    ids=lambda x: x[1][:40] if isinstance(x, tuple) else "",
)  # fmt: skip
def test_a_mistake_names_file_line_and_nearest_name(change, said, tmp_path):
    assert change[0] in SMALL
    assert said in mistakes(tmp_path, SMALL.replace(*change, 1))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("modle1.num_workers=3",
         "unknown component 'modle1' (modle1.num_workers=3 on the command line). Did you mean 'model1'"),
        ("model1=3", "model1 (model1=3 on the command line): it is a component: write model1.KEY=VALUE"),
        ("model1.num_workrs=3",
         "unknown key 'model1.num_workrs' (model1.num_workrs=3 on the command line). Did you mean 'num_workers'"),
        ("model1.num_workers=x",
         "model1.num_workers (model1.num_workers=x on the command line): expected a whole number >= 0, got 'x'"),
        ("trainer1.model=modle1",
         "trainer1.model (trainer1.model=modle1 on the command line): there is no model 'modle1'. Did you mean "
         "'model1'?"),
        ("trial", "expected key=value on the command line, got 'trial'"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line(key, said, tmp_path):
    assert said in mistakes(tmp_path, SMALL, [key])
    assert "mode (--mode x)" not in mistakes(tmp_path, SMALL, [key])


def test_a_wrong_mode_on_the_command_line(tmp_path):
    assert "mode (--mode deply on the command line): expected 'train' or 'deploy'" in mistakes(
        tmp_path, SMALL, mode="deply"
    )


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(tmp_path):
    text = SMALL.replace("model1: {", "model1: {num_wrkers: 1, ").replace("[buffer1]}", "[no], num_steps: x}")
    said = mistakes(tmp_path, text.replace("kind: buffer", "kind: bufer")).splitlines()
    assert said[0] == "4 mistakes in x.yaml:"
    assert [int(re.search(r"x\.yaml:(\d+)", line)[1]) for line in said[1:]] == [3, 4, 7, 7]


def test_agent_and_deploy_mode_need_the_model(tmp_path):
    text = SMALL.replace("module: m}", "module: m, enable: train}").replace("class: A}", "class: A, model: model1}")
    assert "agent1.model (x.yaml:5): 'model1' does not exist in this mode (enable: train). An agent needs" in mistakes(
        tmp_path, text, mode="deploy"
    )


def test_keys_of_ones_own_are_allowed_where_code_reads_them(tmp_path):
    text = SMALL.replace("class: A}", "class: A, speed: 3, colours: [red]}")
    text += "s: {kind: source, module: s, path: demos/, epocs: 3}\nr: {kind: render, module: r, scale: 2}\n"
    text += "b: {kind: buffer, sources: [s]}\nown: {kind: actor, port: 9, module: x, class: X, secret: 1}\n"
    graph = loaded(tmp_path, text)
    assert graph.components["agent1"].extra == {"speed": 3, "colours": ["red"]}
    assert graph.components["s"].extra == {"path": "demos/", "epocs": 3}
    assert graph.components["r"].extra == {"scale": 2}
    assert graph.components["own"].extra == {"secret": 1}
    notes = "\n".join(graph.notes)
    assert f"s.epocs ({tmp_path}/x.yaml:8) is taken as a key of your own; Bray's is 'epoch'" in notes
    assert "b (" in notes
    assert "no trainer reads this buffer" in notes


def test_a_misspelt_key_of_ours_in_an_agents_section_is_told_by_check(tmp_path, capsys):
    text = (TEMPLATE / "rl.yaml").read_text().replace("wait_s: 5.0", "wiat_s: 5.0")
    file = write(tmp_path, text)
    assert main(["launch", "--config", str(file), "--check", "--cluster", "local"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is taken as a key of your own; Bray's is 'wait_s'" in said


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("network.action_space=6", "need an output 'dist' of shape [4], it has [6]"),
        (
            "network.state_space=[4,42,42]",
            "has the shape [5, 7, 7], the example that build_model returns [4, 42, 42]",
        ),
        ("network.state_space=[5]", "build_model raised ValueError"),
    ],
)
def test_check_finds_a_network_that_does_not_fit_the_game(key, said, capsys):
    file = TEMPLATE / "rl.yaml"
    assert main(["launch", "--config", str(file), "--check", "--cluster", "local", key]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "model1" in error
    assert "Traceback" not in error


def test_what_looks_like_a_mistake_is_noted(tmp_path):
    text = (
        SMALL.replace("[agent1]", "[agent1], episode_save_interval: 5") + "lone: {kind: agent, module: a, class: A}\n"
    )
    notes = "\n".join(loaded(tmp_path, text).notes)
    assert "lone (" in notes
    assert "no actor has this agent" in notes
    assert "no episode is saved, dump_state is not true" in notes
    assert "dump_state" not in "\n".join(loaded(tmp_path, text, ["dump_state=true"]).notes)


def test_not_a_launch_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        load(tmp_path / "nowhere.yaml")
    assert "x.yaml: expected keys and values, got [1]" in mistakes(tmp_path, "[1]")
    assert "x.yaml:2: not YAML" in mistakes(tmp_path, "a: 1\n b: [\n")
    assert "2 mistakes in x.yaml" in mistakes(tmp_path, "")


def test_reading_a_file_is_light():
    code = (
        f"import sys; from bray.launch.graph import load; load({str(SL_RL)!r}); print([m for m in ('torch', 'ray', "
        "'gymnasium', 'typer') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --- the user's modules -----------------------------------------------------------------------------------------------


class Project:
    """A project directory with modules, and a launch file in it."""

    def __init__(self, tmp_path):
        self.name = f"game{next(_number)}_{tmp_path.name.replace('-', '_')}"  # Python remembers modules by name
        self.path = tmp_path / self.name
        self.path.mkdir()
        self.write("__init__.py", "")

    def write(self, file, text):
        (self.path / file).write_text(textwrap.dedent(text).replace("NAME", self.name))
        return self.path / file

    def graph(self, text, **kwargs):
        return load(self.write("x.yaml", "project: p\ntrial: t\n" + textwrap.dedent(text)), **kwargs)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def module_mistakes(graph):
    with pytest.raises(ConfigError) as e:
        check_modules(graph)
    return str(e.value)


@pytest.mark.parametrize(
    ("component", "code", "said"),
    [
        ("{kind: model, module: NAME.code}", "def build_modle(name, config): ...",
         "c.module ({x}:3): expected a function build_model(name, config) in {code}, there is none. Did you mean "
         "'build_modle'?"),
        ("{kind: model, module: NAME.code}", "build_model = 3",
         "c.module ({x}:3): expected a function build_model(name, config), NAME.code.build_model is 3"),
        ("{kind: model, module: NAME.cod}", "",
         "c.module ({x}:3): there is no module 'NAME.cod'. Did you mean 'code'?"),
        ("{kind: model, module: nowhere_at_all.code}", "",
         "c.module ({x}:3): there is no module 'nowhere_at_all.code'. It was looked for in "),
        ("{kind: agent, module: NAME.code, class: Agnt}", "class Agent:\n    def on_tick(self, state): ...",
         "c.class ({x}:3): expected a class Agnt with a method on_tick(state) in {code}, there is none. Did you "
         "mean 'Agent'?"),
        ("{kind: agent, module: NAME.code, class: Agent}", "class Agent: ...",
         "c.class ({x}:3): expected a class Agent with a method on_tick(state), NAME.code.Agent is <class"),
        ("{kind: render, module: NAME.code}", "",
         "c.func ({x}:3): expected a function render(episode, tick) in {code}, there is none."),
        ("{kind: trainer, module: NAME.code, class: T, model: m, buffers: [b]}", "class T: ...",
         "expected a class T with a method loss (a bray.Trainer) or update (a Learner)"),
        ("{kind: actor, module: NAME.code, class: A}", "class A: ...", "expected a class A with a method tick(data)"),
        (
            "{kind: actor, agents: [g], serialize: proto, tick_input_proto: {module: NAME.code, message: M}, "
            "tick_output_proto: {module: NAME.code, message: M}}", "", "c.tick_input_proto"),
        (
            "{kind: actor, agents: [g], serialize: proto, tick_input_proto: {file: no.proto, message: M}, "
            "tick_output_proto: {file: no.proto, message: M}}", "", "there is no file no.proto"),
        ("{kind: model, algo: ppo}", "", "{x}:7: unknown key 'algo.lrr' (section ppo)"),
    ],
)  # fmt: skip
def test_modules_are_looked_at_before_anything_starts(component, code, said, project):
    file = project.write("code.py", code)
    project.write("fine.py", "def build_model(name, config): ...\nclass G:\n    def on_tick(self, state): ...")
    graph = project.graph(
        f"c: {component}\nm: {{kind: model, module: NAME.fine}}\nb: {{kind: buffer}}\ng: {{kind: agent, module: "
        f"NAME.fine, class: G}}\nppo: {{kind: config, algorithm: PPO, env: CartPole-v1, settings: {{lrr: 3}}}}"
    )
    expected = said.replace("NAME", project.name).replace("{x}", str(graph.path)).replace("{code}", str(file))
    assert expected in module_mistakes(graph)


def test_what_is_right_passes(project):
    project.write(
        "code.py",
        "def build_model(name, config): ...\ndef build_source(name, config): ...\ndef render(episode, tick): ...\n"
        "class A:\n    def on_tick(self, state): ...\nclass T:\n    def loss(self, replay): ...\n",
    )
    project.write("tick.proto", 'syntax = "proto3";\nmessage M { int32 x = 1; }\n')
    graph = project.graph("""\
        m: {kind: model, module: NAME.code}
        auto: {kind: model, algo: ppo}
        ppo: {kind: config, algorithm: PPO, env: CartPole-v1}
        s: {kind: source, module: NAME.code}
        b: {kind: buffer, sources: [s]}
        a: {kind: agent, module: NAME.code, class: A}
        r: {kind: render, module: NAME.code}
        x:
          kind: actor
          agents: [a]
          serialize: proto
          tick_input_proto: {file: tick.proto, message: M}
          tick_output_proto: {file: tick.proto, message: M}
        t: {kind: trainer, module: NAME.code, class: T, model: m, buffers: [b]}
        """)
    check_modules(graph)


def test_a_module_that_raises_shows_its_own_traceback_first(project):
    file = project.write("code.py", "def helper():\n    return 1 / 0\n\nhelper()\n")
    graph = project.graph("m: {kind: model, module: NAME.code}")
    said = module_mistakes(graph).splitlines()
    assert said[0] == "Traceback (most recent call last):"
    assert said[1] == f'  File "{file}", line 4, in <module>'
    assert said[-1] == (
        f"m.module ({graph.path}:3): module '{project.name}.code' cannot be imported: ZeroDivisionError: division by "
        "zero"
    )
    both = module_mistakes(project.graph("m: {kind: model, module: NAME.code}\nr: {kind: render, module: NAME.no}"))
    assert both.startswith("Traceback")
    assert f"there is no module '{project.name}.no'" in both
    assert both.splitlines()[-1] == f"2 mistakes in {graph.path}, listed above"


def test_a_module_that_misses_another_is_not_called_missing(project):
    project.write("code.py", "import package_that_is_not_there\n")
    said = module_mistakes(project.graph("m: {kind: model, module: NAME.code}"))
    assert "cannot be imported: ModuleNotFoundError: No module named 'package_that_is_not_there'" in said


def test_modules_of_the_other_mode_are_left_alone(project):
    project.write("code.py", "def build_model(name, config): ...")
    text = "m: {kind: model, module: NAME.code}\nn: {kind: model, enable: train, module: NAME.no}"
    check_modules(project.graph(text, mode="deploy"))
    with pytest.raises(ConfigError, match="there is no module"):
        check_modules(project.graph(text))


# --- the schema -------------------------------------------------------------------------------------------------------


def errors(values):
    return [e.message for e in jsonschema.Draft202012Validator(schema()).iter_errors(values)]


def test_a_launch_file_fits_the_schema():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert errors(yaml.safe_load(SL_RL.read_text())) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("model1", {"max_batchsize": 3}, "'max_batchsize' was unexpected"),
        ("model1", {"max_batch_size": "three"}, "'three' is not valid under any of the given schemas"),
        ("model1", {"use_onnx": "trian"}, "'trian' is not valid"),
        ("model1", {"kind": "modle"}, "'modle' is not one of"),
        ("trainer1", {"model": None}, "None is not of type 'string'"),
        ("trainer1", {"eval": {"bufer": "x"}}, "is not valid under any of the given schemas"),
        ("actor1", {"prt": 3}, "'prt' was unexpected"),
        ("buffer1", {"store": "uniform"}, "'store' was unexpected"),
    ],
)
def test_a_typo_does_not_fit_the_schema(name, change, said):
    values = yaml.safe_load(SL_RL.read_text())
    values[name] |= change
    assert any(said in e for e in errors(values)), errors(values)


def test_the_schema_knows_where_keys_of_ones_own_are_allowed():
    values = yaml.safe_load(SL_RL.read_text())
    for name in ("agent1", "eval_source", "render1", "network"):
        values[name]["speed"] = 3
    values["own"] = {"kind": "actor", "module": "m", "class": "C", "speed": 3}
    assert errors(values) == []
    values["nothing"] = 3
    assert set(errors(values)) == {"3 is not of type 'object'"}


def test_the_schema_tells_each_key():
    made = schema()
    for kind, cls in KINDS.items():
        properties = made["$defs"][kind]["properties"]
        assert set(properties) == {"kind", *(row.key for row in rows(cls) if "." not in row.key)}
        assert all(p.get("description") for k, p in properties.items() if k != "kind")
    batch = made["$defs"]["model"]["properties"]["max_batch_size"]
    assert batch["default"] == 1
    assert batch["description"] == options(KINDS["model"])["max_batch_size"].doc


def test_bray_schema_prints_it(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema()))
    assert main(["schema", "trainer"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^eval\.interval +1000 +a whole number > 0 +Steps between evaluations\.", out, re.M)
    assert re.search(r"^class +null +text.* +The class: a `bray.Trainer`", out, re.M)
    assert main(["schema", "trianer"]) == 2
    assert "unknown name 'trianer'. Did you mean 'trainer'" in capsys.readouterr().err


# --- the picture ------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def drawn(graph):
    root = ElementTree.fromstring(svg(graph))
    boxes = {}
    for g in root.iter(f"{SVG}g"):
        rect, name = g.find(f"{SVG}rect"), g.find(f"{SVG}text").text
        boxes[name] = tuple(float(rect.get(k)) for k in ("x", "y", "width", "height"))
    lines = [p for p in root.iter(f"{SVG}path") if p.get("marker-end")]
    return root, boxes, lines


def test_the_picture_shows_every_component_and_edge():
    graph = load(SL_RL)
    root, boxes, lines = drawn(graph)
    assert set(boxes) == set(graph.components)
    assert len(lines) == len(graph.edges) + 1  # and games to the actor
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"template/train_sl_rl_v0", "games :8000", "trains 50 %", "trainer1 publishes"} <= set(texts)
    width, height = float(root.get("width")), float(root.get("height"))
    for x, y, w, h in boxes.values():
        assert min(x, y) >= 0
        assert x + w <= width
        assert y + h <= height
    for a, b in itertools.combinations(boxes.values(), 2):
        assert a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]
    column = {name: x for name, (x, *_) in boxes.items()}
    assert column["actor1"] == column["model1"] < column["agent1"] < column["train_buffer"] < column["trainer1"]


def test_the_picture_of_deploy_mode_names_what_is_left_out():
    root, boxes, _ = drawn(load(SL_RL, mode="deploy"))
    assert "trainer1" not in boxes
    assert any(t.text.startswith("not in this mode: eval_source, train_source") for t in root.iter(f"{SVG}text"))


def test_models_and_buffers_that_code_names_are_dashed(project, monkeypatch):
    project.write(
        "agents.py", 'import bray\n\nclass A:\n    model = bray.RemoteModel("m1")\n    b = "b1"\n    other = "t1"\n'
    )
    graph = project.graph("""\
        m1: {kind: model, module: NAME.models}
        b1: {kind: buffer}
        a1: {kind: agent, module: NAME.agents, class: A}
        x1: {kind: actor, agents: [a1]}
        t1: {kind: trainer, module: NAME.agents, class: T, model: m1, buffers: [b1]}
        """)
    assert edges_in_code(graph) == [Edge("a1", "b1", "pushes"), Edge("m1", "a1", "answers")]
    assert "NAME" not in sys.modules
    assert f"{project.name}.agents" not in sys.modules
    _, _, lines = drawn(graph)
    assert sum(p.get("stroke-dasharray") is not None for p in lines) == 2


def test_odd_names_are_escaped(tmp_path):
    root, _, _ = drawn(loaded(tmp_path, SMALL, project="a<b>&c"))
    assert any(t.text == "a<b>&c/t" for t in root.iter(f"{SVG}text"))
