"""How the bytes of a tick become state.input, and state.output bytes."""

import importlib
import json
import shlex
import subprocess
import sys

import numpy as np
import pytest

from bray.errors import ConfigError
from bray.serving.agent import Agent, AgentActor
from bray.serving.messages import BadMessage, make_codec
from tests.agent_for_tests import PROTOS, agent, generated_messages, play, protoc, run, tick  # noqa: F401  (fixtures)

# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "sent"),
    [
        ({}, {}),
        ({"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)}, {"a": 3, "b": 0.5, "c": True}),
        ({"a": np.arange(3), "b": np.zeros((2, 1))}, {"a": [0, 1, 2], "b": [[0.0], [0.0]]}),
        ({"a": np.array(7), "b": (1, [np.uint8(2)])}, {"a": 7, "b": [1, [2]]}),
        ({"a": np.float64("nan"), "b": float("inf")}, {"a": None, "b": None}),
        ({"a": {"b": None, "ü": "ß"}}, {"a": {"b": None, "ü": "ß"}}),
        ([1, 2], [1, 2]),
    ],
)
def test_what_json_sends(output, sent):
    def sets(state):
        state.output = output

    assert json.loads(run(play({"a": agent(sets)}))[0]) == sent


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{]", b"\xff\xfe", b'"\xff"', b"{} x", b"NaN", b"1e999", b"[" * 10_000, b"\x80\x04K\x01."]
)
def test_bad_json_is_a_400_and_reaches_no_agent(data):
    ticks = []

    async def main():
        actor = AgentActor({"a": agent(lambda state: ticks.append(state.tick))}, serialize="json")
        await actor.start("s", b"")
        with pytest.raises(BadMessage, match=f"expected JSON, got {len(data)} bytes") as e:
            await tick(actor, data)
        assert e.value.status == 400
        assert json.loads(e.value.body)["error"] == "malformed"
        await tick(actor)

    run(main())
    assert ticks == [0]


def test_what_json_cannot_hold_is_named():
    def sets(state):
        state.output["x"] = object()

    with pytest.raises(TypeError, match=r"state\.output holds a object; JSON holds numbers"):
        run(play({"a": agent(sets)}))


def test_bytes_in_bytes_out():
    def sets(state):
        state.output = state.input[::-1] if state.input != b"view" else memoryview(b"ok")

    assert run(play({"a": agent(sets)}, data=b"abc", serialize=None)) == [b"cba"]
    assert run(play({"a": agent(sets)}, data=b"view", serialize=None)) == [b"ok"]


@pytest.mark.parametrize(("output", "match"), [("text", "to be bytes .* got str"), (None, "none of a did")])
def test_bytes_that_are_none(output, match):
    def sets(state):
        if output is not None:
            state.output = output

    with pytest.raises(TypeError, match=match):
        run(play({"a": agent(sets)}, serialize=None))


def test_with_bytes_an_agent_can_wait_for_the_output():
    seen = []

    async def watches(state):
        seen.append(await state.wait("output"))

    async def acts(state):
        state.output = b"go"

    assert run(play({"w": agent(watches), "a": agent(acts)}, serialize=None)) == [b"go"]
    assert seen == [b"go"]


@pytest.mark.parametrize("form", ["class", "text", "mapping"])
def test_messages_in_messages_out(messages, form):
    def name(message):
        return {
            "class": getattr(messages, message),
            "text": f"made.tick_pb2:{message}",
            "mapping": {"module": "made.tick_pb2", "message": message},
        }[form]

    async def acts(state):
        state.output.action = int(sum(state.input.position)) + state.input.items["sword"]
        state.output.values.extend(state.input.position)

    data = messages.TickInput(position=[1, 2], items={"sword": 4}).SerializeToString()
    protos = {"tick_input_proto": name("TickInput"), "tick_output_proto": name("TickOutput")}
    replies = run(play({"a": agent(acts)}, 2, data, serialize="proto", **protos))
    assert [messages.TickOutput.FromString(r) for r in replies] == [messages.TickOutput(action=7, values=[1, 2])] * 2


def test_bytes_that_are_no_message_are_a_400(messages):
    codec = make_codec("proto", messages.TickInput, messages.TickOutput)
    with pytest.raises(BadMessage, match=r"expected a bray_test.TickInput message, got 2 bytes"):
        codec.decode(b"\x0a\xff")
    with pytest.raises(TypeError, match=r"expected state.output to be a bray_test.TickOutput"):
        codec.encode(messages.TickInput())


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (None, "tick_input_proto .*expected 'module:Message'.* got None"),
        ("made.tick_pb2", "expected 'module:Message'"),
        ("made.tick_pb2:", "expected 'module:Message'"),
        (int, "expected 'module:Message'.*got <class 'int'>"),
        ({"module": "made.tick_pb2"}, "expected 'module:Message'"),
        ("made.tick_pb2:TickInptu", "unknown message 'TickInptu' .*in module made.tick_pb2.*Did you mean 'TickInput'"),
        ("made.tick_pb2:DESCRIPTOR", "made.tick_pb2.DESCRIPTOR is not a protobuf message"),
        ("made.tock_pb2:TickInput", "there is no module made.tock_pb2"),
        ("nowhere.tick_pb2:TickInput", "there is no module nowhere.tick_pb2"),
    ],
)
def test_a_message_class_that_is_not_there(messages, spec, match):
    with pytest.raises(ConfigError, match=match):
        make_codec("proto", spec, messages.TickOutput)


def test_the_protos_do_not_matter_to_json():
    proto = {"module": "template.tick_pb2", "message": "TickInput"}
    make_codec("json", proto, proto)
    make_codec(None, proto, proto)


OLD_STYLE = """# -*- coding: utf-8 -*-
# Generated by the protocol buffer compiler.  DO NOT EDIT!
# source: tick.proto
from google.protobuf import descriptor as _descriptor
DESCRIPTOR = _descriptor.FileDescriptor(name='tick.proto', package='old', syntax='proto3', serialized_pb=b'')
_TICKINPUT = _descriptor.Descriptor(
    name='TickInput', full_name='old.TickInput', filename=None, file=DESCRIPTOR, containing_type=None,
    fields=[_descriptor.FieldDescriptor(
        name='x', full_name='old.TickInput.x', index=0, number=1, type=5, cpp_type=1, label=1, has_default_value=False,
        default_value=0, message_type=None, enum_type=None, containing_type=None, is_extension=False,
        extension_scope=None, file=DESCRIPTOR)])
"""


@pytest.mark.filterwarnings("ignore:Call to deprecated create function:DeprecationWarning")
@pytest.mark.parametrize("style", ["newer", "old", "removed"])
@pytest.mark.parametrize("package", ["", "pack"])
def test_a_generated_module_of_another_protobuf_is_refused_with_the_command_that_makes_it_again(
    tmp_path, monkeypatch, style, package
):
    proto = f"{style}{package}.proto"  # the pool of protobuf knows each file name once
    source = f"{package}/{proto}" if package else proto
    (tmp_path / source).parent.mkdir(exist_ok=True)
    text = (PROTOS / "tick.proto").read_text().replace("bray_test", f"refused_{style}{package}")
    (tmp_path / source).write_text(text)
    protoc(tmp_path, source)
    file = tmp_path / source.replace(".proto", "_pb2.py")
    generated = file.read_text()
    foreign = {
        "newer": generated.replace("Domain.PUBLIC,\n", "Domain.PUBLIC,\n    9") if style == "newer" else "",
        "old": OLD_STYLE.replace("tick.proto", source),
        "removed": generated.replace("descriptor as _descriptor", "descriptor_of_old as _descriptor", 1),
    }[style]
    assert foreign != generated
    file.write_text(foreign)
    monkeypatch.syspath_prepend(tmp_path)
    module = source.replace(".proto", "_pb2").replace("/", ".")
    with pytest.raises(ConfigError, match="generated for another protobuf") as e:
        make_codec("proto", f"{module}:TickInput", f"{module}:TickOutput")
    assert e.value.__cause__ is not None
    command = shlex.split(str(e.value).partition("Generate it again: ")[2])
    assert command[:3] == ["python", "-m", "grpc_tools.protoc"]
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=60, cwd=tmp_path.parent)
    assert file.read_text() == generated
    importlib.invalidate_caches()
    sys.modules.pop(module, None)
    codec = make_codec("proto", f"{module}:TickInput", f"{module}:TickOutput")
    assert codec.decode(b"").DESCRIPTOR.full_name == f"refused_{style}{package}.TickInput"


def test_a_module_that_fails_by_itself_gets_no_such_advice(tmp_path, monkeypatch):
    (tmp_path / "broken_messages.py").write_text("1 / 0\n")
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, match in (("broken_messages", "ZeroDivisionError"), ("needs_more", "not_installed_anywhere")):
        with pytest.raises(ConfigError, match=match) as e:
            make_codec("proto", f"{module}:TickInput", None)
        assert "protoc" not in str(e.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"serialize": "jsn"}, "unknown serialize 'jsn'.*json"),
        ({"serialize": "proto"}, "tick_input_proto"),
        ({"episode_length": 0}, "episode_length: expected a whole number from 1, got 0"),
        ({"episode_length": True}, "episode_length"),
        ({"episode_save_interval": 0}, "episode_save_interval"),
        ({"episode_save_interval": 10}, "save_dir"),
        ({"keep": 0}, "keep"),
        ({"agents": {}}, "needs agents"),
        ({"agents": {"a": object}}, r"agent 'a': expected a class with a method on_tick\(state\)"),
    ],
)
def test_configurations_that_cannot_work(options, match):
    with pytest.raises(ConfigError, match=match):
        AgentActor(**{"agents": {"a": Agent}, **options})
