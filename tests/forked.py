"""`bray` commands and exports of graphs in processes of their own that begin with their modules loaded: to import them
was most of what such a process cost the CPU. They are forked as the workers of a training are; signals, exit codes and
output are those of any process."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
from multiprocessing import reduction, resource_tracker

import numpy as np

import bray.__main__
from bray.cli.main import main
from bray.envs.fork_server import ForkedProcess, leave


class _Fd:
    """A file descriptor, which arrives in the new process as a number."""

    def __init__(self, fd):
        self.fd = fd

    def __reduce__(self):
        return _arrived, (reduction.DupFd(self.fd),)


def _arrived(fd):
    return fd.detach()


class _Process(ForkedProcess):
    module = "tests.forked_modules"


class Popen(subprocess.Popen):
    """As that of `subprocess`, for `python -m bray ...` and `python -c ...`."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid,
                       umask, start_new_session, process_group):  # fmt: skip
        program, *words = [os.fspath(word) for word in args]
        assert program == sys.executable, "subprocess.Popen starts other programs"
        assert words[0] == "-c" or words[:2] == ["-m", "bray"]
        fds = [_Fd(given if given != -1 else ours) for ours, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._polling = threading.Lock()
        group = 0 if start_new_session else process_group
        place = (os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env))
        self._process = _Process(target=_command, args=(words, *place, fds, group, preexec_fn), daemon=True)
        self._process.start()
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, **_):
        with self._polling:
            if self.returncode is None:
                self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout):
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def interrupted(process):
    """What a training says after it has got Ctrl-C at its first row, to its end."""
    for line in process.stdout:
        if line.startswith("iter "):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    process.wait()
    assert process.returncode == 130
    assert "ended by Ctrl-C" in rest
    return rest


def run(args, *, timeout, **kwargs):
    """As that of `subprocess`; output is captured."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _command(words, cwd, env, fds, group, preexec):
    """In the new process: become what `python` with these words is."""
    leave()
    multiprocessing.current_process()._config["daemon"] = False  # it may have workers of its own
    np.random.seed()  # those of all would draw the same numbers
    resource_tracker._resource_tracker._fd = None  # its own, which tidies up when it is killed
    if group != -1:
        os.setpgid(0, group)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False, buffering=1) for fd in (1, 2))
    sys.stdout.reconfigure(write_through=unbuffered, line_buffering=unbuffered)
    if preexec is not None:
        preexec()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    how, what, *words = words
    sys.argv = [bray.__main__.__file__ if how == "-m" else how, *words]
    sys.modules["__main__"] = bray.__main__ if how == "-m" else types.ModuleType("__main__")
    code = 1
    try:
        if how == "-m":
            code = main(words)
        else:
            exec(what, vars(sys.modules["__main__"]))
            code = 0
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
    finally:
        for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout and sys.stdout.flush, sys.stderr.flush):
            if end:
                end()
        os._exit(code)
