"""What is installed: its name, its parts, how messages say to install more, and an installation that nobody may write
to."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from bray._version import __version__
from bray.errors import how_to_install

ROOT = Path(__file__).parents[2]
TEXTS = [
    "README.md",
    "pyproject.toml",
    "Makefile",
    "bray",
    "docs",
    "docker",
    "deploy",
    "template",
    "examples",
    "clients",
]
SUFFIXES = {".md", ".py", ".toml", ".yaml", ".Dockerfile", ".service", ".txt", ""}


def texts():
    for name in TEXTS:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and file.suffix in SUFFIXES and "__pycache__" not in file.parts:
                yield file, file.read_text(errors="replace")


def test_nothing_sends_anybody_to_other_software_of_our_name():
    """`bray` on the package index is not this Bray."""
    wrong = re.compile(r"pip install (?:[^\n`|&;]*[ '\"])?bray(?![\w./-])|(?<![\w-])bray\[")
    found = [f"{file.relative_to(ROOT)}: {hit}" for file, text in texts() for hit in wrong.findall(text)]
    assert found == []


def test_a_hint_names_the_repository_and_the_wheel():
    hint = how_to_install("serve")
    assert "'.[serve]' in Bray's repository" in hint
    assert f"bray_rl-{__version__}-py3-none-any.whl[serve]" in hint
    assert how_to_install("box2d").startswith("make box2d in Bray's repository")  # pip alone cannot compile it


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.nb[ic]")
    for name in ("bray", "template", "docs", "deploy"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    for kind in ("sdist", "wheel"):
        build = f"import sys; from setuptools.build_meta import build_{kind}; build_{kind}(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


def test_wheel_and_source_distribution_are_complete(built):
    wheel = zipfile.ZipFile(next(built.glob("bray_rl-*-py3-none-any.whl")))
    names = set(wheel.namelist())
    for file in (
        "bray/__init__.py",
        "bray/py.typed",
        "bray/_template/rl.yaml",
        "bray/presets/scores.json",
        "bray/serving/metrics.py",
    ):
        assert file in names
    assert {name.split("/")[0] for name in names} == {"bray", f"bray_rl-{__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith((".nbi", ".nbc"))]
    with tarfile.open(next(built.glob("bray_rl-*.tar.gz"))) as archive:
        source = archive.getnames()
    top = f"bray_rl-{__version__}"
    for file in (
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "constraints.txt",
        "bray/_template/rl.yaml",
        "docs/openapi.yaml",
    ):
        assert f"{top}/{file}" in source


def test_the_metadata_is_valid_and_a_service_needs_neither_torch_nor_numba(built):
    wheel = zipfile.ZipFile(next(built.glob("*.whl")))
    data = wheel.read(f"bray_rl-{__version__}.dist-info/METADATA")
    about = Metadata.from_email(data, validate=True)
    assert (about.name, str(about.version), about.license_expression) == ("bray-rl", __version__, "Apache-2.0")
    assert email.message_from_bytes(data)["Description-Content-Type"] == "text/markdown"
    needed = [Requirement(str(r)) for r in about.requires_dist]
    of = {
        extra: {r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})}
        for extra in ("", "serve", "train")
    }
    assert not of["serve"] & {"torch", "numba", "gymnasium", "ray"}
    assert of["serve"] >= {"onnxruntime", "httptools", "numpy"}
    assert of["train"] >= {"torch", "numba"}
    assert not of[""] & {"onnxruntime", "torch", "numba"}


def test_twine_takes_both(built):
    twine = shutil.which("twine")
    if twine is None:
        pytest.skip("twine is not installed here: pip install twine, anywhere on the PATH")
    files = [str(x) for x in built.iterdir() if x.suffix in (".whl", ".gz")]
    done = subprocess.run([twine, "check", "--strict", *files], capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(files)) == (0, 2), done.stdout


# --- an installation that belongs to somebody else --------------------------------------------------------------------

LOOPS = """
import bray, numpy as np, os
import bray.data.prioritized, bray.data.windows, bray.envs._kernels, bray.rl.draws
from bray.rl.returns import gae
no = np.zeros((1, 1), bool)
print(os.access(os.path.dirname(bray.__file__), os.W_OK), gae(np.zeros((2, 1)), np.ones((1, 1)), no, no, ~no, 0.9, 0.9))
"""
TRAIN = """
import sys
from bray.cli.main import main
stop = '{"env_steps_total": 64}'
where = ["--project", "p", "--trial", "t"]
sys.exit(main(["train", "--run", "DQN", "--env", "CartPole-v1", *where, "--stop", stop, "learning_starts=32"]))
"""


@pytest.fixture
def nobody(tmp_path):
    """How a user who may write neither to the package nor (unless told otherwise) to a home directory runs Python."""
    powerless = []
    if os.getuid() == 0:  # who may write anywhere: take that away
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed here, and root may write everywhere")
        powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    site, home, work = (tmp_path / name for name in ("site", "home", "work"))
    shutil.copytree(ROOT / "bray", site / "bray", ignore=shutil.ignore_patterns("__pycache__", "_template"))
    home.mkdir()
    work.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    env |= {"PYTHONPATH": str(site), "HOME": str(home), "XDG_STATE_HOME": str(work)}
    for folder in (site, *(x for x in site.rglob("*") if x.is_dir())):
        folder.chmod(0o555)

    def python(code, home_writable):
        home.chmod(0o755 if home_writable else 0o555)
        words = [*powerless, sys.executable, "-c", code]
        return subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=300)

    yield python
    for folder in (home, site, *(x for x in site.rglob("*") if x.is_dir())):
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("code", "home_writable"),
    [(LOOPS, True), (LOOPS, False), pytest.param(TRAIN, False, marks=pytest.mark.slow)],
    ids=["with a home", "without a home", "a whole training"],
)
def test_a_read_only_installation_works_for_another_user(nobody, code, home_writable):
    """Compiled loops go to the user's cache; where there is none they are compiled anew, which is said once."""
    done = nobody(code, home_writable)
    assert done.returncode == 0, done.stderr
    assert code == TRAIN or done.stdout == "False [[1.]]\n"
    assert done.stderr.count("compiled loops are not kept") == (0 if home_writable else 1)
    assert "Traceback" not in done.stderr
