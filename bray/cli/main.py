"""The command line: the options of `bray.cli.options` as Typer commands, and errors as messages.

Nothing heavy is imported before a command runs: `bray --help` answers at once. `main` turns errors into one message and
an exit code:
0 done, 1 not done (or the user's own code raised), 2 a mistake of the user, 130 and 143 ended by a signal before the
end was reached.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from bray.cli.flags import Command, make_function
from bray.cli.options import COMMANDS
from bray.config.hints import hint
from bray.errors import BrayError, StoppedBySignal, did_you_mean, how_to_install

NOT_YET = ("dashboard",)
"""Commands that are planned and are not there."""

_EXTRAS = {
    **dict.fromkeys(
        ("torch", "gymnasium", "tensorboard", "matplotlib", "imageio", "PIL", "onnxscript", "numba"), "train"
    ),
    **dict.fromkeys(("httptools", "onnxruntime", "onnx"), "serve"),
}
"""Packages that an installation without extras leaves out, and the extra that brings them."""
_FAKE = "Partners to develop against: a service without an agent, games without a game."
_KNOWN = sorted({name.split()[0] for name in COMMANDS})
_GROUPS = [[name.split()[0]] for name in COMMANDS if " " in name]


def make_app(words: list[str]) -> typer.Typer:
    """The commands. Only the one that `words` begin with gets its flags, because those of a config have to be
    imported."""
    app = typer.Typer(
        name="bray",
        help="Train a game agent, look at it, and serve it to live games.",
        epilog="Start with: bray train --run PPO --env CartPole-v1",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(_root)
    fake = typer.Typer(help=_FAKE, rich_markup_mode=None)
    for name, (cls, function) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        called = words[: len(name.split())] == name.split()
        made = make_function(name, cls, function) if called else _stub(inspect.getdoc(cls))
        listed = (inspect.getdoc(cls) or "").partition("\n\n")[0]  # whole: what Typer shortens ends in "..."
        (fake if group else app).command(last, cls=Command, short_help=listed)(made)
    app.add_typer(fake, name="fake", short_help=_FAKE)
    return app


def _stub(help: str | None) -> Any:
    """A command that is only listed."""

    def listed() -> None: ...

    listed.__doc__ = help
    return listed


def _version(value: bool) -> None:
    if value:
        from bray._version import __version__

        typer.echo(f"bray {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    pass


# --- errors -----------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    _set_import_path(Path.cwd())
    try:
        _refuse_unknown_command(argv)
        if argv == [] or argv in _GROUPS:
            argv = [*argv, "--help"]
        code = make_app(argv)(_optional_value(argv), prog_name="bray", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BrayError as e:
        if debug:
            traceback.print_exc()
        return _complain(str(e), 2)
    except KeyboardInterrupt:
        return _complain("stopped by Ctrl-C", 130)
    except StoppedBySignal as e:
        code = int(e.code or 0)
        return _complain(f"stopped by {'Ctrl-C' if code == 130 else signal.Signals(code - 128).name}", code)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    except BrokenPipeError:  # `bray envs | head`
        sys.stdout = None
        return 1
    except ModuleNotFoundError as e:
        if debug or e.name not in _EXTRAS:
            traceback.print_exception(_without_ours(e))
            return 1
        return _complain(f"this command needs {e.name}, which is not installed: {how_to_install(_EXTRAS[e.name])}", 2)
    except Exception as e:
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) and not debug:
            return _complain(
                f"could not write {e.filename or 'the output'} ({e.strerror}): free some space, or choose another "
                "place",
                1,
            )
        if hasattr(e, "format_message"):  # how Typer says that an option is wrong
            return _usage(e)
        traceback.print_exception(_without_ours(e))
        return 1


def _set_import_path(here: Path) -> None:
    """`--env mygame:Env` means the file beside the user. Inside of a run directory it does not: that is data."""
    if (here / "config.yaml").exists() and (here / "checkpoints").is_dir():
        sys.path[:] = [p for p in sys.path if p not in ("", str(here))]
    elif "" not in sys.path and str(here) not in sys.path:
        sys.path.insert(0, str(here))


def _complain(message: str, code: int) -> int:
    """`error: ...` on stderr. A user's traceback inside a message comes before it."""
    if message.startswith("Traceback"):
        trace, _, message = message.rpartition("\n")
        print(trace, file=sys.stderr)
    print(f"error: {message}", file=sys.stderr)
    return code


def _without_ours(e: Exception) -> Exception:
    """The exception without the frames of the command line itself."""
    frame = e.__traceback__
    while frame is not None and frame.tb_next is not None:
        name = frame.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(("typer", "click", "bray.cli.main", "bray.cli.flags")):
            break
        frame = frame.tb_next
    return e.with_traceback(frame)


def _refuse_unknown_command(argv: list[str]) -> None:
    name = next((a for a in argv if not a.startswith("-")), None)
    if name is None or name in _KNOWN:
        return
    if told := hint(f"bray {name}"):
        raise BrayError(f"unknown command {name!r}.{told}")
    if name in NOT_YET:
        raise BrayError(f"`bray {name}` is not there yet. There are: {', '.join(_KNOWN)}.")
    near = difflib.get_close_matches(name.lower(), [*_KNOWN, *NOT_YET], n=1, cutoff=0.6)
    if near and near[0] in NOT_YET:
        raise BrayError(f"unknown command {name!r}; `bray {near[0]}` is not there yet either.")
    raise BrayError(f"unknown command {name!r}.{did_you_mean(name, _KNOWN)} `bray --help` lists all.")


def _optional_value(argv: list[str]) -> list[str]:
    """`eval ... --render human` (or `--render=human`) as a flag of its own: Typer's options take a value or do not."""
    if argv[:1] != ["eval"]:
        return argv
    return (
        "\0".join(argv)
        .replace("--render\0human", "--render-human")
        .replace("--render=human", "--render-human")
        .split("\0")
    )


def _is_key(name: str) -> bool:
    """Whether a config of `bray train` may have this key."""
    from bray.algos import ALGORITHMS
    from bray.cli.schema import find_sections
    from bray.config.declare import options

    sections = [find_sections(section)[section] for section in ("run", "env", "model", "live", "data", *ALGORITHMS)]
    return any(name in options(cls) for cls in sections)


def _usage(e: Any) -> int:
    """A wrong option, in the same voice as our own errors."""
    context = getattr(e, "ctx", None)
    command = context.command_path if context is not None else "bray"
    option = getattr(e, "option_name", None)
    if option and not option.startswith("--"):
        option = None  # Typer names the parameter there when a value is missing
    if option and context is not None and "value" not in str(e):
        known = [o for p in context.command.params for o in p.opts if o.startswith("--")]
        told = hint(option if command == "bray train" else f"{command} {option}")
        near = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
        message = f"unknown option {option!r}." + (told or (f" Did you mean {near[0]!r}?" if near else ""))
        key = option.lstrip("-").replace("-", "_")
        if command == "bray train" and not near and not told:
            message += f" Config keys are written without dashes: {key}=VALUE." if _is_key(key) else hint(key)
    else:
        message = str(e.format_message()).replace("Value error, ", "").rstrip(".")  # pydantic's, inside of Typer's
        message += "" if message.endswith("?") else "."
        message = message[:1].lower() + message[1:]
    return _complain(f"{message} `{command} --help` lists all options.", 2)


if __name__ == "__main__":
    sys.exit(main())
