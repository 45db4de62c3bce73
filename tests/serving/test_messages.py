"""Messages of a tick that are named by their .proto file, and generated modules that today's protobuf refuses."""

import asyncio
import pickle
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bray.errors import ConfigError, UnknownName
from bray.serving import messages
from bray.serving.agent import Agent, AgentActor
from bray.serving.messages import CompiledMessage, compile_message, make_codec, message_class

TICK = (Path(__file__).parents[1] / "protos" / "tick.proto").read_text()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project directory in which the command is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game").mkdir()
    (tmp_path / "game" / "tick.proto").write_text(TICK)
    return tmp_path


def codec_of(form, folder=None):
    specs = [compile_message(form(name), name, folder) for name in ("TickInput", "TickOutput")]
    return make_codec("proto", *specs)


# --- .proto files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda name: {"file": "game/tick.proto", "message": name},
        lambda name: f"game/tick.proto:{name}",
        lambda name: {"file": str(Path("game/tick.proto").resolve()), "message": f"bray_test.{name}"},
        lambda name: {"file": Path("game/tick.proto"), "message": name},
        lambda name: {"module": "game/tick.proto", "message": name},
    ],
    ids=["mapping", "text", "absolute", "path", "module"],
)
def test_a_proto_file_is_compiled_at_the_start(project, form):
    codec = codec_of(form)
    sent = codec.input(position=[1, 2], items={"sword": 4})
    back = codec.decode(sent.SerializeToString())
    assert (list(back.position), back.items["sword"]) == ([1, 2], 4)
    out = codec.new_output()
    out.action = 3
    assert codec.encode(out) == b"\x08\x03"
    assert codec.input.DESCRIPTOR.full_name == "bray_test.TickInput"


def test_an_agent_actor_with_a_proto_file(project):
    class Acts(Agent):
        def on_tick(self, state):
            state.output.action = len(state.input.position)

    async def main():
        protos = {"tick_input_proto": "game/tick.proto:TickInput", "tick_output_proto": "game/tick.proto:TickOutput"}
        actors = [AgentActor({"a": Acts}, serialize="proto", **protos) for _ in range(50)]
        await actors[0].start("s", b"")
        sent = messages.message_class(protos["tick_input_proto"], "tick_input_proto")
        return actors[0].tick(sent(position=[5, 6, 7]).SerializeToString())

    compiled = messages.compile_proto.cache_info().misses
    assert asyncio.run(main()) == b"\x08\x03"
    assert messages.compile_proto.cache_info().misses == compiled + 1


def test_a_relative_path_is_that_of_the_launch_file_first(project, monkeypatch):
    (project / "other").mkdir()
    (project / "tick.proto").write_text(TICK.replace("bray_test", "here"))
    (project / "other" / "tick.proto").write_text(TICK.replace("bray_test", "there"))
    for folder, package in ((None, "here"), (project / "other", "there"), ("other", "there"), (project / "game", None)):
        codec = codec_of(lambda name: f"tick.proto:{name}", folder)
        assert codec.input.DESCRIPTOR.file.package == (package or "bray_test")
    monkeypatch.chdir(project / "game")
    assert codec_of(lambda name: f"other/tick.proto:{name}", project).input.DESCRIPTOR.file.package == "there"


@pytest.mark.parametrize("style", ["beside", "from the top", "from the middle", "well known"])
def test_proto_files_import_others(project, style):
    deep = project / "protos" / "game"
    deep.mkdir(parents=True)
    name = {"beside": "types.proto", "from the top": "protos/game/types.proto", "from the middle": "game/types.proto"}
    imports = name.get(style, "google/protobuf/timestamp.proto")
    type_ = "google.protobuf.Timestamp" if style == "well known" else "types.Point"
    (deep / "types.proto").write_text('syntax = "proto3"; package types; message Point { int32 x = 1; int32 y = 2; }')
    (deep / "tick.proto").write_text(
        f'syntax = "proto3"; package deep; import "{imports}";\n'
        f"message TickInput {{ {type_} at = 1; }} message TickOutput {{ repeated {type_} to = 1; }}"
    )
    codec = codec_of(lambda message: f"protos/game/tick.proto:{message}")
    sent = codec.input()
    if style == "well known":
        sent.at.FromSeconds(90)
        assert codec.decode(sent.SerializeToString()).at.ToSeconds() == 90
    else:
        sent.at.x, sent.at.y = 3, 4
        out = codec.new_output()
        out.to.add().CopyFrom(codec.decode(sent.SerializeToString()).at)  # one Point in both messages
        assert (out.to[0].x, out.to[0].y) == (3, 4)


def test_files_with_the_same_names_do_not_collide(project):
    """A generated module of the same file in the same process, and two files that define the same message otherwise."""
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Igame", "--python_out=.", "game/tick.proto"],
        check=True,
        timeout=60,
    )
    code = f"""
    import sys
    sys.path.insert(0, {str(project)!r})
    from pathlib import Path
    from bray.serving.messages import message_class
    import tick_pb2
    first = message_class("game/tick.proto:TickInput", "first")
    again = message_class("game/tick.proto:TickInput", "again")
    text = Path("game/tick.proto").read_text()
    Path("tick.proto").write_text(text.replace("string name = 2", "bytes name = 2"))
    other = message_class("tick.proto:TickInput", "other")
    Path("game/tick.proto").write_text(text.replace("string name = 2", "int64 name = 2"))
    changed = message_class("game/tick.proto:TickInput", "changed")
    assert first is again and len({{first, other, changed, tick_pb2.TickInput}}) == 4
    print(first(name="a"), other(name=b"b"), changed(name=3), tick_pb2.TickInput(name="d"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["name:", '"a"', "name:", '"b"', "name:", "3", "name:", '"d"']


def test_a_compiled_message_travels_without_its_file(project):
    compiled = pickle.loads(pickle.dumps(compile_message("game/tick.proto:TickInput", "tick_input_proto")))
    assert isinstance(compiled, CompiledMessage)
    (project / "game" / "tick.proto").unlink()
    cls = message_class(compiled, "tick_input_proto")
    assert cls(name="x").SerializeToString() == b"\x12\x01x"
    assert compile_message(compiled, "tick_input_proto") is compiled


def test_specs_that_name_no_file_are_left_alone():
    for spec in (None, "module:Message", {"module": "m", "message": "M"}, int):
        assert compile_message(spec, "key") is spec


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("game/tock.proto:TickInput", "tick_input_proto: there is no file game/tock.proto; looked for /.*/tock.proto"),
        ("game/tick.proto:TickInptu", "unknown message 'TickInptu' .*in tick.proto.*Did you mean 'TickInput'"),
        ({"file": "game/tick.proto"}, r"expected \{file: path/name.proto, message: Name\}"),
        ({"file": "game/tick.proto", "message": "TickInput", "module": "m"}, "expected {file"),
        ({"file": 3, "message": "TickInput"}, "expected {file"),
        ("game/broken.proto:TickInput", r"(?s)broken.proto cannot be compiled:.*broken.proto:2:.*Missing field number"),
        ("game/lonely.proto:TickInput", r"(?s)lonely.proto cannot be compiled:.*nowhere.proto"),
    ],
)
def test_what_cannot_be_compiled_is_said(project, spec, match):
    (project / "game" / "broken.proto").write_text('syntax = "proto3";\nmessage TickInput { int32 x; }\n')
    (project / "game" / "lonely.proto").write_text('syntax = "proto3";\nimport "nowhere.proto";\n')
    with pytest.raises(ConfigError, match=match):
        make_codec("proto", spec, spec)


def test_without_protoc_the_command_that_installs_it_is_said(project, monkeypatch):
    (project / "game" / "fresh.proto").write_text(TICK)
    monkeypatch.setitem(sys.modules, "grpc_tools", None)
    with pytest.raises(ConfigError, match=r"pip install grpcio-tools.*module: fresh_pb2"):
        message_class("game/fresh.proto:TickInput", "tick_input_proto")


def test_a_message_inside_another_has_a_dotted_name(project):
    (project / "n.proto").write_text('syntax = "proto3"; package p; message Out { message In { int32 x = 1; } }')
    assert message_class("n.proto:Out.In", "k").DESCRIPTOR.full_name == "p.Out.In"
    with pytest.raises(UnknownName, match="Known: Out"):
        message_class("n.proto:In", "k")


# --- generated modules of long ago ------------------------------------------------------------------------------------

# What protoc wrote for a message TickInput with one int32 field x, by its version.
FIELD = """
    _descriptor.FieldDescriptor(
      name='x', full_name='{package}.TickInput.x', index=0,
      number=1, type=5, cpp_type=1, label=1,
      has_default_value=False, default_value=0,
      message_type=None, enum_type=None, containing_type=None,
      is_extension=False, extension_scope=None,
      {options}=None{file}),
"""
OLD = {
    "2.6": """# Generated by the protocol buffer compiler.  DO NOT EDIT!
# source: {source}

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf import reflection as _reflection
from google.protobuf import descriptor_pb2
# @@protoc_insertion_point(imports)


DESCRIPTOR = _descriptor.FileDescriptor(
  name='{source}',
  package='{package}',
  serialized_pb='{serialized}')


_TICKINPUT = _descriptor.Descriptor(
  name='TickInput',
  full_name='{package}.TickInput',
  filename=None,
  file=DESCRIPTOR,
  containing_type=None,
  fields=[{field}  ],
  extensions=[
  ],
  nested_types=[],
  enum_types=[
  ],
  options=None,
  is_extendable=False,
  extension_ranges=[],
  serialized_start=20,
  serialized_end=42,
)

DESCRIPTOR.message_types_by_name['TickInput'] = _TICKINPUT

class TickInput(_message.Message):
  __metaclass__ = _reflection.GeneratedProtocolMessageType
  DESCRIPTOR = _TICKINPUT

# @@protoc_insertion_point(module_scope)
""",
    "3.6": """# Generated by the protocol buffer compiler.  DO NOT EDIT!
# source: {source}

import sys
_b=sys.version_info[0]<3 and (lambda x:x) or (lambda x:x.encode('latin1'))
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf import reflection as _reflection
from google.protobuf import symbol_database as _symbol_database
# @@protoc_insertion_point(imports)

_sym_db = _symbol_database.Default()




DESCRIPTOR = _descriptor.FileDescriptor(
  name='{source}',
  package='{package}',
  syntax='{syntax}',
  serialized_options=None,
  serialized_pb=_b('{serialized}')
)




_TICKINPUT = _descriptor.Descriptor(
  name='TickInput',
  full_name='{package}.TickInput',
  filename=None,
  file=DESCRIPTOR,
  containing_type=None,
  fields=[{field}  ],
  extensions=[
  ],
  nested_types=[],
  enum_types=[
  ],
  serialized_options=None,
  is_extendable=False,
  syntax='{syntax}',
  extension_ranges=[],
  oneofs=[
  ],
  serialized_start=20,
  serialized_end=42,
)

DESCRIPTOR.message_types_by_name['TickInput'] = _TICKINPUT
_sym_db.RegisterFileDescriptor(DESCRIPTOR)

TickInput = _reflection.GeneratedProtocolMessageType('TickInput', (_message.Message,), dict(
  DESCRIPTOR = _TICKINPUT,
  __module__ = '{module}'
  # @@protoc_insertion_point(class_scope:{package}.TickInput)
  ))
_sym_db.RegisterMessage(TickInput)


# @@protoc_insertion_point(module_scope)
""",
    "3.19": """# -*- coding: utf-8 -*-
# Generated by the protocol buffer compiler.  DO NOT EDIT!
# source: {source}
\"\"\"Generated protocol buffer code.\"\"\"
from google.protobuf import descriptor as _descriptor
from google.protobuf import descriptor_pool as _descriptor_pool
from google.protobuf import message as _message
from google.protobuf import reflection as _reflection
from google.protobuf import symbol_database as _symbol_database
# @@protoc_insertion_point(imports)

_sym_db = _symbol_database.Default()




DESCRIPTOR = _descriptor_pool.Default().AddSerializedFile(b'{serialized}')



_TICKINPUT = DESCRIPTOR.message_types_by_name['TickInput']
TickInput = _reflection.GeneratedProtocolMessageType('TickInput', (_message.Message,), {{
  'DESCRIPTOR' : _TICKINPUT,
  '__module__' : '{module}'
  # @@protoc_insertion_point(class_scope:{package}.TickInput)
  }})
_sym_db.RegisterMessage(TickInput)

if _descriptor._USE_C_DESCRIPTORS == False:

  DESCRIPTOR._options = None
  _TICKINPUT._serialized_start=20
  _TICKINPUT._serialized_end=42
# @@protoc_insertion_point(module_scope)
""",
}


def old_module(version, source, package, syntax):
    """The text that protoc of that version wrote, with the right serialized descriptor inside."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name=source, package=package, syntax="" if syntax == "proto2" else syntax)
    file.message_type.add(name="TickInput").field.add(name="x", number=1, type=5, label=1)
    field = FIELD.format(
        package=package,
        options="options" if version == "2.6" else "serialized_options",
        file=", file=DESCRIPTOR" if version == "3.6" else "",
    )
    return OLD[version].format(
        source=source,
        package=package,
        syntax=syntax,
        field=field,
        serialized="".join(f"\\x{byte:02x}" for byte in file.SerializeToString()),
        module=source.replace(".proto", "_pb2").replace("/", "."),
    )


PROTO = {
    "proto3": 'syntax = "proto3";\npackage {package};\nmessage TickInput {{ int32 x = 1; }}\n',
    "proto2": "package {package};\nmessage TickInput {{ optional int32 x = 1; }}\n",  # no syntax line: proto2 is meant
}


def ask(module):
    """A message of a module in the current directory, in a process of its own: protobuf remembers what a module
    registered before it failed."""
    code = f"""
    import sys
    sys.path.insert(0, "")
    from bray.errors import ConfigError
    from bray.serving.messages import message_class
    try:
        print(message_class("{module}:TickInput", "tick_input_proto")(x=7))
    except ConfigError as e:
        sys.exit(str(e))
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(("version", "syntax"), [("2.6", "proto2"), ("3.6", "proto2"), ("3.6", "proto3")])
def test_a_module_of_long_ago_is_answered_with_the_command_that_makes_it_again(project, version, syntax, nested):
    package = f"old_{version.replace('.', '_')}_{syntax}"
    source = f"game/{package}.proto" if nested else f"{package}.proto"
    (project / source).write_text(PROTO[syntax].format(package=package))
    generated = project / source.replace(".proto", "_pb2.py")
    generated.write_text(old_module(version, source, package, syntax))
    module = source.replace(".proto", "_pb2").replace("/", ".")

    first = ask(module)
    assert first.returncode == 1, first.stdout
    assert f"module {module} cannot be imported" in first.stderr
    assert "generated for another protobuf" in first.stderr
    command = shlex.split(first.stderr.partition("Generate it again: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=60, cwd=project.parent)
    assert ask(module).stdout.strip() == "x: 7"


def test_a_module_of_3_19_still_works(project):
    (project / "not_so_old_pb2.py").write_text(old_module("3.19", "not_so_old.proto", "not_so_old", "proto3"))
    assert ask("not_so_old_pb2").stdout.strip() == "x: 7"


def test_the_command_is_for_the_module_that_is_refused_and_its_proto_file(project, monkeypatch):
    """A module that is fine imports one that is not; their .proto files lie elsewhere than the modules."""
    made = project / "made"
    made.mkdir()
    Path("game/inner_type.proto").write_text(PROTO["proto3"].format(package="inner_type"))
    Path("game/outer_type.proto").write_text(
        'syntax = "proto3"; package outer_type; import "game/inner_type.proto";'
        "message TickInput { inner_type.TickInput inner = 1; }"
    )
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I."]
    subprocess.run([*protoc, "--python_out=made", "game/outer_type.proto"], check=True, timeout=60)
    inner = made / "game" / "inner_type_pb2.py"
    inner.write_text(old_module("3.6", "game/inner_type.proto", "inner_type", "proto3"))
    (made / "game" / "__init__.py").touch()
    monkeypatch.syspath_prepend(made)
    for name in [m for m in sys.modules if m == "game" or m.startswith("game.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="Generate it again") as e:
        message_class("game.outer_type_pb2:TickInput", "tick_input_proto")
    command = shlex.split(str(e.value).partition("Generate it again: ")[2])
    assert command == [
        *("python", "-m", "grpc_tools.protoc", "-I", str(project), f"--python_out={made}", "game/inner_type.proto")
    ]
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=60, cwd=project.parent)
    assert "_builder" in inner.read_text()

    Path("game/inner_type.proto").unlink()
    inner.write_text(old_module("3.6", "game/inner_type.proto", "inner_type", "proto3"))
    monkeypatch.setitem(sys.modules, "grpc_tools", None)
    with pytest.raises(ConfigError, match=r"DIR: the directory in which game/inner_type.proto lies.*-I DIR") as e:
        message_class("game.outer_type_pb2:TickInput", "tick_input_proto")
    assert "Generate it again: pip install grpcio-tools && python" in str(e.value)
