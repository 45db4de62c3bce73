"""What an environment needs and this machine does not have, as one sentence; and warnings that are given once."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterator
from types import TracebackType

_DISPLAY = re.compile(r"display|video (device|system|mode)|\bX11\b|\bEGL\b|\bGLX\b|OpenGL context", re.IGNORECASE)
_WINDOWS = {"pygame", "tkinter", "_tkinter", "pyglet", "Xlib", "glfw", "OpenGL", "mujoco", "cv2"}
"""Packages whose errors about a display are meant."""
_PIP_NAMES = {"cv2": "opencv-python", "PIL": "pillow", "Box2D": "box2d-py", "skimage": "scikit-image"}

_told: set[str] = set()


def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning that this process has not given before."""
    if message not in _told:
        _told.add(message)
        log.warning("%s", message)


def what_is_missing(error: BaseException) -> str | None:
    """The package, display, variable or program for lack of which `error` was raised, as in "it needs ..."; None for
    other errors."""
    for e in _chain(error):
        if (found := _missing(e)) is not None:
            return found
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it was raised from, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _missing(e: BaseException) -> str | None:
    text = " ".join(str(e).split())
    if isinstance(e, KeyError) and _raised_in(e.__traceback__, "os.py"):
        return f"the environment variable {e.args[0]}, which is not set: export {e.args[0]}=..."
    if "environment variable" in text and isinstance(e, (ImportError, SystemExit, OSError, RuntimeError, ValueError)):
        return f"an environment variable that is not set ({text})"
    if isinstance(e, ModuleNotFoundError) and e.name:
        package = e.name.split(".")[0]
        return f"the module {e.name!r}, which is not installed: pip install {_PIP_NAMES.get(package, package)}"
    if isinstance(e, ImportError):
        return f"something that cannot be imported ({text})"
    if isinstance(e, FileNotFoundError) and _raised_in(e.__traceback__, subprocess.__file__):
        return f"the program {e.filename!r}, which is not installed or not on the PATH"
    root = type(e).__module__.split(".")[0]
    if "Display" in type(e).__name__ or (root in _WINDOWS and _DISPLAY.search(text)):
        return f"a display ({text}): run it under `xvfb-run -a`, or set SDL_VIDEODRIVER=dummy (pygame) or MUJOCO_GL=egl"
    if isinstance(e, SystemExit):
        return f"something to go on: it called sys.exit({text})"
    return None


def _raised_in(trace: TracebackType | None, file: str) -> bool:
    """Whether the error was raised in this file of the standard library."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.replace("<frozen os>", "os.py").endswith(file)
