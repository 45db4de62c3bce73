"""What a tick carries: JSON, protobuf messages, or bytes. A codec parses the input and writes the output.

A protobuf message is named by its generated module, or by its .proto file, which is then compiled when the service
starts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from bray.errors import ConfigError, UnknownName
from bray.serving.protocol import Refusal

MAX_JSON = 1 << 20
"""Bytes of JSON that a tick may have where nobody asks for more: decoded it is up to thirty times as large."""


def json_too_large(size: int, most: int) -> Refusal:
    way = "send arrays as base64, or messages as protobuf or bytes (serialize), or raise max_json"
    return Refusal(413, "too_large", f"a tick has at most {most} bytes of JSON, this one {size}: {way}")


class BadMessage(Refusal):
    """The client sent what cannot be read. It is answered with 400 malformed and this message; the session goes on."""

    def __init__(self, message: str):
        super().__init__(400, "malformed", message)


class Codec(Protocol):
    """How the bytes of a tick become `state.input`, and `state.output` bytes."""

    def decode(self, data: bytes) -> Any:
        """`state.input`; BadMessage when the bytes are not of this form."""

    def new_output(self) -> Any:
        """A fresh `state.output`; None = there is none until an agent sets it."""

    def encode(self, output: Any) -> bytes:
        """The reply."""


def make_codec(serialize: str | None, tick_input_proto: Any = None, tick_output_proto: Any = None) -> Codec:
    """The codec of `serialize`: json | proto | None. The two protos count only for `proto`; each is named in one of the
    ways of `message_class`."""
    if serialize is None:
        return _bytes_codec
    if serialize == "json":
        return _json_codec
    if serialize == "proto":
        return ProtoCodec(
            message_class(tick_input_proto, "tick_input_proto"), message_class(tick_output_proto, "tick_output_proto")
        )
    raise UnknownName("serialize", str(serialize), ("json", "proto", "null"))


# --- bytes ------------------------------------------------------------------------------------------------------------


class BytesCodec:
    """Bytes in, bytes out."""

    def decode(self, data: bytes) -> bytes:
        return data

    def new_output(self) -> None:
        return None

    def encode(self, output: Any) -> bytes:
        if type(output) is bytes:
            return output
        if isinstance(output, (bytes, bytearray, memoryview)):
            return bytes(output)
        raise TypeError(f"expected state.output to be bytes (serialize is null), got {type(output).__name__}")


_bytes_codec = BytesCodec()

# --- JSON -------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """What JSON cannot hold, as something it can: numpy's scalars and arrays, and what turns into an array."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    raise TypeError(
        f"state.output holds a {type(value).__qualname__}; JSON holds numbers, text, lists, dicts and (as lists) arrays"
    )


_decode_json = msgspec.json.Decoder().decode
_encode_json = msgspec.json.Encoder(enc_hook=_plain).encode


class JsonCodec:
    """JSON in, a dict out (or any other value that JSON can hold). Numbers that are not finite leave as null, bytes as
    base64."""

    def decode(self, data: bytes) -> Any:
        try:
            return _decode_json(data)
        except (ValueError, RecursionError) as e:  # ValueError: malformed, or text that is not UTF-8
            raise BadMessage(f"expected JSON, got {len(data)} bytes that are not: {e}") from None

    def new_output(self) -> dict[str, Any]:
        return {}

    def encode(self, output: Any) -> bytes:
        return _encode_json(output)


_json_codec = JsonCodec()

# --- protobuf ---------------------------------------------------------------------------------------------------------


class ProtoCodec:
    """A message of one class in, a message of another out."""

    def __init__(self, input: Any, output: Any):
        from google.protobuf.message import DecodeError

        self.input, self.output = input, output
        self.new_output = output
        self._error = DecodeError

    def decode(self, data: bytes) -> Any:
        try:
            return self.input.FromString(data)
        except self._error as e:
            name = self.input.DESCRIPTOR.full_name
            raise BadMessage(f"expected a {name} message, got {len(data)} bytes that are not one: {e}") from None

    def encode(self, output: Any) -> bytes:
        if not isinstance(output, self.output):
            name = self.output.DESCRIPTOR.full_name
            raise TypeError(f"expected state.output to be a {name} message (fill the one there), got {type(output)}")
        data: bytes = output.SerializeToString()
        return data


class CompiledMessage(NamedTuple):
    """A message of a .proto file that has been compiled. It can be sent to another machine, which then needs neither
    the file nor protoc."""

    file: str
    """As protoc calls it."""
    message: str
    descriptors: bytes
    """A FileDescriptorSet: the file and all that it imports."""


def message_class(spec: Any, key: str) -> Any:
    """The message class that a config names:

    "module:Message"            or {"module": ..., "message": ...}, a module that protoc generated
    "path/tick.proto:Message"   or {"file": ..., "message": ...}, a file that is compiled now
    a CompiledMessage, or the class itself
    """
    from google.protobuf.message import Message

    spec = compile_message(spec, key)
    if isinstance(spec, CompiledMessage):
        return _class_of(spec, key)
    if isinstance(spec, type) and issubclass(spec, Message):
        return spec
    if isinstance(spec, Mapping) and isinstance(spec.get("module"), str) and isinstance(spec.get("message"), str):
        module_name, name = spec["module"], spec["message"]
    elif isinstance(spec, str) and all(spec.partition(":")):
        module_name, _, name = spec.partition(":")
    else:
        raise ConfigError(
            f"{key} (serialize is proto): expected 'module:Message', 'path/name.proto:Message', {{module: ..., "
            f"message: ...}}, {{file: ..., message: ...}} or a generated message class, got {spec!r}"
        )
    module = _import_generated(module_name, key)
    found = getattr(module, name, None)
    if found is None:
        messages = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Message)]
        raise UnknownName("message", name, messages, f"{key}, in module {module_name}")
    if not (isinstance(found, type) and issubclass(found, Message)):
        raise ConfigError(f"{key}: {module_name}.{name} is not a protobuf message but {found!r}")
    return found


# --- .proto files


def compile_message(spec: Any, key: str, folder: Path | str | None = None) -> Any:
    """A spec that names a .proto file as a CompiledMessage; any other spec as it is. A relative path is looked for in
    `folder` (that of the launch file) and in the current directory."""
    if isinstance(spec, Mapping) and ("file" in spec or str(spec.get("module")).endswith(".proto")):
        file, name = spec.get("file", spec.get("module")), spec.get("message")
        if not isinstance(file, (str, Path)) or not isinstance(name, str) or len(spec) != 2:
            raise ConfigError(f"{key}: expected {{file: path/name.proto, message: Name}}, got {dict(spec)!r}")
    elif isinstance(spec, str) and spec.rpartition(":")[0].endswith(".proto"):
        file, _, name = spec.rpartition(":")
    else:
        return spec
    folders = [Path(folder)] if folder is not None else []
    folders = [f.absolute() for f in (*folders, Path())]
    found = next((path for f in folders if (path := f / file).is_file()), None)
    if found is None:
        tried = " and ".join(str(f / file) for f in dict.fromkeys(folders))
        raise ConfigError(f"{key}: there is no file {file}; looked for {tried}")
    found = found.resolve()
    # protoc looks for imports in these: beside the file and above it, as far as the project reaches
    roots = [f for f in found.parents if f == found.parent or any(f.is_relative_to(g.resolve()) for g in folders)]
    status = found.stat()
    try:
        descriptors = compile_proto(found, (*roots, *folders), status.st_mtime_ns, status.st_size)
    except ConfigError as e:
        raise ConfigError(f"{key}: {e}") from None
    compiled = CompiledMessage(found.name, name, descriptors)
    _class_of(compiled, key)  # a message that is not there is told now
    return compiled


@functools.lru_cache(maxsize=64)
def compile_proto(path: Path, roots: tuple[Path, ...], modified: int, size: int) -> bytes:
    """The FileDescriptorSet of a .proto file. Every Actor of a service asks for it, so each state of a file is compiled
    once."""
    if importlib.util.find_spec("grpc_tools") is None:
        raise ConfigError(
            f"compiling {path.name} needs protoc, which is not installed: pip install grpcio-tools. Or generate the "
            f"module where it is installed (python -m grpc_tools.protoc -I. --python_out=. {path.name}) and name it: "
            f"{{module: {path.stem}_pb2, message: ...}}"
        )
    with tempfile.TemporaryDirectory(prefix="bray-proto-") as temporary:
        out = Path(temporary) / "descriptors"
        command = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{root}" for root in dict.fromkeys(roots))]
        command += ["--include_imports", f"--descriptor_set_out={out}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
        if done.returncode != 0:
            raise ConfigError(f"{path} cannot be compiled:\n{done.stderr.strip()}")
        return out.read_bytes()


@functools.lru_cache(maxsize=64)
def _pool_of(descriptors: bytes) -> Any:
    """A pool of its own for each set: what the default pool of this process holds, or another file that uses the same
    names, is not in the way. The same set has the same classes everywhere."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    return pool


def _class_of(compiled: CompiledMessage, key: str) -> Any:
    from google.protobuf.message_factory import GetMessageClass

    pool = _pool_of(compiled.descriptors)
    file = pool.FindFileByName(compiled.file)
    prefix = file.package + "." if file.package else ""
    for name in (prefix + compiled.message, compiled.message):
        try:
            return GetMessageClass(pool.FindMessageTypeByName(name))
        except KeyError:
            pass
    raise UnknownName("message", compiled.message, file.message_types_by_name, f"{key}, in {compiled.file}")


# --- generated modules


def _import_generated(module: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is not None and (module == e.name or module.startswith(e.name + ".")):
            raise ConfigError(
                f"{key}: there is no module {module}. `python -m grpc_tools.protoc` makes it from a .proto file; "
                f"run the service where it can be imported, or name the file: {{file: path/name.proto, message: ...}}"
            ) from None
        raise _refused(module, key, e) from e
    except Exception as e:  # protobuf refuses modules of other versions with errors of many types
        raise _refused(module, key, e) from e


def _refused(module: str, key: str, error: Exception) -> ConfigError:
    """Why a module cannot be imported, with the command that generates it anew if protoc made it."""
    from google.protobuf import __version__

    reason = (
        f"{key}: module {module} cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:300]})."
    )
    spec = importlib.util.find_spec(module)
    files = [spec.origin] if spec is not None and spec.origin is not None else []
    trace = error.__traceback__
    while trace is not None:  # a module that it imports may be the one that is refused: the last one counts
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    generated = [(Path(f), head) for f in files if (head := _generated_head(f))]
    if not generated:
        return ConfigError(reason)
    file, head = generated[-1]
    found = re.search(r"^# source: (.+\.proto)$", head, re.MULTILINE)
    source = found[1] if found else file.name.removesuffix("_pb2.py") + ".proto"
    root = file.parent
    for _ in Path(source).parent.parts:  # `source` is relative to the directory that protoc was run with
        root = root.parent
    beside = next((f for f in (root, Path.cwd()) if (f / source).is_file()), None)
    where = shlex.quote(str(beside)) if beside is not None else "DIR"
    hint = "" if beside is not None else f" (DIR: the directory in which {source} lies)"
    tools = "" if importlib.util.find_spec("grpc_tools") else "pip install grpcio-tools && "
    return ConfigError(
        f"{reason} It was generated for another protobuf than the {__version__} that is installed{hint}. Generate it "
        f"again: {tools}python -m grpc_tools.protoc -I {where} --python_out={shlex.quote(str(root))} "
        f"{shlex.quote(source)}"
    )


def _generated_head(file: str) -> str:
    """The head of a module that protoc wrote; '' for any other file."""
    if not file.endswith(".py"):
        return ""
    try:
        with open(file, encoding="utf-8", errors="replace") as f:
            head = f.read(2000)
    except OSError:
        return ""
    return head if "Generated by the protocol buffer compiler" in head else ""
