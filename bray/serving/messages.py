"""What a tick carries: JSON, protobuf messages, or bytes. A codec parses the input and writes the output."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from bray.errors import ConfigError, UnknownName
from bray.serving.protocol import Refusal


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
    """The codec of `serialize`: json | proto | None. The two protos count only for `proto`; each is a message class,
    "module:Message", or {"module": ..., "message": ...}."""
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
        return output.SerializeToString()


def message_class(spec: Any, key: str) -> Any:
    """The message class that a config names: "module:Message", {"module": ..., "message": ...}, or the class itself."""
    from google.protobuf.message import Message

    if isinstance(spec, Mapping) and isinstance(spec.get("module"), str) and isinstance(spec.get("message"), str):
        module_name, name = spec["module"], spec["message"]
    elif isinstance(spec, str) and all(spec.partition(":")):
        module_name, _, name = spec.partition(":")
    elif isinstance(spec, type) and issubclass(spec, Message):
        return spec
    else:
        raise ConfigError(
            f"{key} (serialize is proto): expected 'module:Message', {{module: ..., message: ...}} or a generated "
            f"message class, got {spec!r}"
        )
    module = _import_generated(module_name, key)
    found = getattr(module, name, None)
    if found is None:
        messages = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Message)]
        raise UnknownName("message", name, messages, f"{key}, in module {module_name}")
    if not (isinstance(found, type) and issubclass(found, Message)):
        raise ConfigError(f"{key}: {module_name}.{name} is not a protobuf message but {found!r}")
    return found


def _import_generated(module: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is not None and (module == e.name or module.startswith(e.name + ".")):
            raise ConfigError(
                f"{key}: there is no module {module}. `python -m grpc_tools.protoc` makes it from a .proto file; "
                f"run the service where it can be imported."
            ) from None
        raise _refused(module, key, e) from e
    except Exception as e:  # protobuf refuses modules of other versions with errors of many types
        raise _refused(module, key, e) from e


def _refused(module: str, key: str, error: Exception) -> ConfigError:
    """Why a module cannot be imported, with the command that generates it anew if protoc made it."""
    from google.protobuf import __version__

    spec = importlib.util.find_spec(module)
    file = Path(spec.origin) if spec is not None and spec.origin is not None else None
    head = file.read_text(errors="replace")[:2000] if file is not None and file.suffix == ".py" else ""
    reason = (
        f"{key}: module {module} cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:300]})."
    )
    if file is None or "Generated by the protocol buffer compiler" not in head:
        return ConfigError(reason)
    found = re.search(r"^# source: (.+\.proto)$", head, re.MULTILINE)
    source = found[1] if found else file.name.removesuffix("_pb2.py") + ".proto"
    root = file.parent
    for _ in Path(source).parent.parts:  # `source` is relative to the directory that protoc was run with
        root = root.parent
    where = shlex.quote(str(root))
    return ConfigError(
        f"{reason} It was generated for another protobuf than the {__version__} that is installed. Generate it again: "
        f"python -m grpc_tools.protoc -I {where} --python_out={where} {shlex.quote(source)}"
    )
