"""The settings of a service are declared once, and hold wherever games are answered: `bray serve`, `bray train --live`
and the actors of `bray.RemoteActor` and launch files."""

import contextlib
import json
from dataclasses import fields

import pytest

import bray
from bray.cli.flags import make_function
from bray.cli.main import main
from bray.cli.options import COMMANDS
from bray.client import Client, ClientError
from bray.config.declare import options
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.launch.settings import ActorSettings
from bray.remote.actor.handle import RemoteActor
from bray.remote.actor.options import ActorOptions
from bray.serving.config import ServiceConfig, ServiceSettings
from bray.train.config import LiveConfig
from tests.ray_for_tests import local_session  # noqa: F401
from tests.serving.test_tls import CERT, TLS
from tests.serving_for_tests import Echo, Wire, http_request, until

TICK = json.dumps({"obs": [0.5, 0.5]}).encode()
SMALL = {"obs": "float32[2]", "actions": 2, "rollout_length": 16, "minibatches": 1, "epochs": 1, "rows": 64}
NAMES = sorted(options(ServiceSettings))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    exp = Experiment(run="PPO", live=True, path=tmp_path_factory.mktemp("trained") / "run", port=0, **SMALL)
    exp.save()
    exp.close()
    return exp.path


@pytest.fixture(params=["serve", "live", "actor"])
def service(request, trained, tmp_path):
    """Starts a service with these settings: gives its port and its admin port."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            settings = {"port": 0, "admin_port": 0, "drain_timeout_s": 0.0, **settings}
            if request.param == "serve":
                exp = Experiment.load(trained)
                made = stack.enter_context(exp.serve(block=False, engine="torch", **settings))
            elif request.param == "live":
                exp = Experiment(run="PPO", live=True, path=tmp_path / "run", **SMALL, **settings)
                stack.callback(exp.close)
                made = exp.training.source
            else:
                request.getfixturevalue("local_session")
                made = RemoteActor(actors_per_worker=100, **settings)
                made.serve(Actor=Echo)
                stack.callback(made.stop)
            return made.port, made.admin_port

        yield start


def code(reply):
    return json.loads(reply)["error"]


def test_nobody_ticks_or_ends_the_session_of_another(service):
    port, _ = service(session_secrets=True)
    with Wire(port) as mine, Wire(port) as other:
        status, headers, _ = mine.send(http_request("start", "g")).response()
        assert status == 200
        for kind in ("tick", "end"):
            status, reply = other.step(kind, "g", TICK, session_secret="0" * 32)
            assert (status, code(reply)) == (403, "bad_secret")
        assert mine.step("tick", "g", TICK, session_secret=headers["session_secret"])[0] == 200
        assert mine.step("end", "g", b"{}", session_secret=headers["session_secret"])[0] == 200


def test_sessions_that_are_abandoned_lock_nobody_out(service):
    """One address may have so many, and those whose connection has closed are soon free."""
    port, _ = service(max_sessions_per_address=3, disconnect_timeout_s=0.2)
    with Wire(port) as greedy:
        assert [greedy.step("start", f"g{i}")[0] for i in range(5)] == [200, 200, 200, 429, 429]

    def free():
        with Wire(port) as honest:
            return honest.step("start", "honest")[0] == 200

    until(free)


def test_limits_on_connections_and_requests(service):
    port, _ = service(max_connections_per_address=2, max_requests_per_address=3)
    with Wire(port) as one, Wire(port), Wire(port) as third:
        status, _, reply = third.response()
        assert (status, code(reply)) == (429, "too_many_connections")
        replies = [one.step("start", f"g{i}")[1] for i in range(20)]
        assert code(replies[-1]) == "too_many_requests"


def test_tokens_are_wanted(service, tmp_path, monkeypatch):
    (tmp_path / "tokens").write_text("good\n")
    monkeypatch.setenv("BRAY_TOKEN", "better")
    port, _ = service(token_file=str(tmp_path / "tokens"))
    with Wire(port) as wire:
        statuses = [wire.step("start", token, token=token)[0] for token in ("good", "better", "bad")]
    assert statuses == [200, 200, 401]


def test_tls_alone_is_spoken(service):
    port, _ = service(**TLS)
    with Client(port=port, tls=CERT, retries=0) as client:
        client.start()
        assert client.tick(TICK)
    with Client(port=port, retries=0, timeout=10) as client, pytest.raises(ClientError):
        client.start()


def test_the_admin_port_wants_its_token(service):
    _, admin = service(admin_tokens=("boss",))
    with Wire(admin) as wire:
        head = b"POST /models/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        status, _, reply = wire.send(head).response()
    assert (status, code(reply)) == (401, "bad_admin_token")


# --- one declaration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ServiceConfig, LiveConfig, ActorOptions, ActorSettings])
def test_every_setting_of_a_service_is_there_with_the_same_default_and_meaning(kind):
    ours, theirs = options(ServiceSettings), options(kind)
    own = {"tokens"} if kind is LiveConfig else set()  # beside `token`
    for name in ours:
        assert theirs[name].default == ours[name].default
        assert name in own or theirs[name].doc == ours[name].doc
    assert own >= {f.name for f in fields(ServiceSettings) if f.name in kind.__annotations__}, "declared again"


def test_flags_of_serve_are_flags_of_live_training():
    def flags(command):
        parameters = make_function(command, *COMMANDS[command]).__signature__.parameters.values()
        found = [p.annotation.__metadata__[0] for p in parameters]
        return {name for info in found for name in (info.default, *(info.param_decls or ()))}

    mine = {o.flag.names or f"--{name.replace('_', '-')}" for name, o in options(ServiceSettings).items() if o.flag}
    assert mine - {"--token"} <= flags("serve") & flags("train")


def test_every_setting_is_a_key_on_the_command_line_of_live_training(capsys):
    words = ["train", "--run", "PPO", "--live", "--obs", "float32[2]", "--actions", "2", "--print-config"]
    assert main([*words, "max_sessions_per_address=7", "disconnect_timeout_s=3", "live.max_bodies=77"]) == 0
    shown = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert (shown["live.max_sessions_per_address"], shown["live.max_bodies"]) == ("7", "77")
    assert {f"live.{name}" for name in NAMES} <= shown.keys()


def test_impossible_settings_are_refused_in_live_training_too():
    with pytest.raises(ConfigError, match="framed TCP has no place"):
        Experiment(run="PPO", live=True, session_secrets=True, use_tcp=True, **SMALL)
    with pytest.raises(ConfigError, match="tls_key without tls_cert"):
        Experiment(run="PPO", live=True, tls_key="key.pem", **SMALL)


def test_the_address_that_games_are_told_says_tls(tmp_path):
    exp = bray.Experiment(run="PPO", live=True, path=tmp_path / "run", port=0, **TLS, **SMALL)
    assert exp.training.source.url == f"https://127.0.0.1:{exp.training.source.port}/step"
    exp.close()
