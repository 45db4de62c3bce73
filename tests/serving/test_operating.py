"""docs/operating.md: the files of deploy/, metrics, logs and the OpenAPI file, against a real `bray serve`."""

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import jsonschema
import pytest
import yaml

import bray
from bray.cli.main import main
from bray.cli.show import log_shown
from bray.experiment import Experiment, export_graph
from bray.rundir import logging_to
from bray.serving.metrics import HELP
from tests import forked

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OBS = [0.01, -0.02, 0.03, 0.04]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "ppo"
    exp = Experiment("PPO", "CartPole-v1", path=path, use_preset=False, num_envs=2, rollout_length=16, epochs=1)
    list(exp.train(stop={"training_iteration": 1}))
    exp.close()
    export_graph(path)
    return path


@pytest.fixture(scope="module")
def service(run, tmp_path_factory):
    """`bray serve` as the files of deploy/ start it, on free ports; `logs` is what it says."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "tokens").write_text("token-1\n")
    (folder / "admin-token").write_text("admin-1\n")
    files = ["--token-file", str(folder / "tokens"), "--admin-token-file", str(folder / "admin-token")]
    words = ["serve", str(run), "--port", "0", "admin_port=0", "--workers", "2", "--log-format", "json", *files]
    process = forked.Popen(
        [sys.executable, "-m", "bray", *words], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        process.logs = []
        for line in process.stdout:
            process.logs.append(line)
            if found := re.search(r"serving on 127.0.0.1:(\d+), admin port 127.0.0.1:(\d+)", line):
                process.port, process.admin_port = map(int, found.groups())
                break
        else:
            raise AssertionError("".join(process.logs))
        with bray.Client(port=process.port, token="token-1") as client:
            client.start()
            process.action = client.tick({"obs": OBS})["action"]
            client.end()
        with (
            bray.Client(port=process.port, token="token-2", retries=0) as stranger,
            pytest.raises(bray.client.ClientError),
        ):
            stranger.start()
        yield process
        process.send_signal(signal.SIGTERM)
        process.logs += process.stdout.readlines()
        assert process.wait(30) == 0
        assert all(set(json.loads(line)) >= {"time", "level", "logger", "process", "message"} for line in process.logs)
    finally:
        process.kill()
        process.communicate()


def fetch(url, data=None, **headers):
    """(status, headers, body)"""
    body = None if data is None else data if isinstance(data, bytes) else json.dumps(data).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as reply:
            return reply.status, dict(reply.headers), reply.read()
    except urllib.error.HTTPError as e:
        return e.code, dict(e.headers), e.read()


def admin(service, path, *more, **headers):
    return fetch(f"http://127.0.0.1:{service.admin_port}{path}", *more, **headers)


# --- logs and metrics -------------------------------------------------------------------------------------------------


def test_every_line_of_the_log_is_json_when_asked_for(service):
    lines = [json.loads(line) for line in service.logs]
    assert any(line["message"].startswith("serving on") and line["level"] == "info" for line in lines)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)


def test_log_files_of_a_launch_are_json_when_asked_for(tmp_path, capsys):
    with log_shown("info", "json"), logging_to(tmp_path / "bray.log"):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("bray.serving").exception("an Actor raised %s", "ö")
    for text in (capsys.readouterr().err, (tmp_path / "bray.log").read_text()):
        line = json.loads(text)
        assert (line["level"], line["logger"], line["message"]) == ("error", "bray.serving", "an Actor raised ö")
        assert line["exception"].endswith("ValueError: two\nlines")
    with logging_to(tmp_path / "text.log"):
        logging.getLogger("bray").warning("plain again")
    assert (tmp_path / "text.log").read_text().endswith("WARNING plain again\n")
    assert main(["launch", "--help"]) == 0
    assert "--log-format" in capsys.readouterr().out


def test_another_log_format_is_refused(capsys):
    assert main(["serve", "run", "--log-format", "xml"]) == 2
    assert "xml" in capsys.readouterr().err


def exported(service):
    """{name: (type, help)} of /metrics, a histogram's parts under their own names too."""
    text = admin(service, "/metrics")[2].decode()
    helps = dict(re.findall(r"^# HELP (\w+) (.+)$", text, re.M))
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    assert helps.keys() == kinds.keys()
    assert len(re.findall(r"^# TYPE", text, re.M)) == len(kinds)
    names = set(re.findall(r"^(\w+)(?:\{.*\})? \S+$", text, re.M))
    return names, helps, kinds


def test_every_metric_has_help_and_type(service):
    names, helps, kinds = exported(service)
    assert helps == HELP
    for name in names:
        base = re.sub("_(bucket|sum|count)$", "", name)
        assert kinds[base] == ("histogram" if base != name else "counter" if name.endswith("_total") else "gauge")


def metrics_of(text):
    return set(re.findall(r"\bbray_\w+", text))


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist(service):
    names, _, _ = exported(service)
    board = json.loads((DEPLOY / "grafana" / "bray-service.json").read_text())
    asked = metrics_of(" ".join(t["expr"] for panel in board["panels"] for t in panel["targets"]))
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    alerts = metrics_of(" ".join(rule["expr"] for rule in rules))
    adapter = metrics_of((DEPLOY / "prometheus" / "adapter-rules.yaml").read_text())
    assert asked | alerts | adapter <= names
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} == set(HELP), "the dashboard shows everything"
    assert all(rule["annotations"].keys() == {"summary", "action"} for rule in rules)


# --- files ------------------------------------------------------------------------------------------------------------


def dockerfile(instruction):
    """The JSON words of an instruction of docker/serve.Dockerfile."""
    text = (ROOT / "docker" / "serve.Dockerfile").read_text().replace("\\\n", "")
    return json.loads(re.search(rf"^{instruction}[^\[\n]*(\[.*\])$", text, re.M)[1])


def test_the_health_check_of_the_image_works(service):
    command = [sys.executable, *dockerfile("HEALTHCHECK")[1:]]
    assert "8001/healthz" in command[-1]
    for port, code in ((service.admin_port, 0), (9, 1)):
        done = subprocess.run([*command[:-1], command[-1].replace("8001", str(port))], capture_output=True, timeout=20)
        assert done.returncode == code


def words_of(file):
    """How a file starts `bray serve`."""
    entry = dockerfile("ENTRYPOINT")
    if file == "compose":
        text = (DEPLOY / "compose.yaml").read_text()
        return [*entry, *yaml.safe_load(text)["services"]["bray"]["command"]]
    if file == "kubernetes":
        return [*entry, *pod()["containers"][0]["args"]]
    unit = (DEPLOY / "bray-serve.service").read_text().replace("\\\n", "")
    return [word for word in shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.M)[1]) if word != "$BRAY_ARGS"]


def pod():
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "service.yaml").read_text())
    return next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]


@pytest.mark.parametrize("file", ["compose", "kubernetes", "systemd"])
def test_bray_serve_knows_the_words_of_the_files(file, capsys):
    program, command, *words = words_of(file)
    assert (Path(program).name, command) == ("bray", "serve")
    assert main([command, *words[:-1], "no/such/run"]) == 2
    assert capsys.readouterr().err == "error: no/such/run: there is no such run directory\n"


def seconds(words):
    return next(float(word.partition("=")[2]) for word in words if word.startswith("drain_timeout_s="))


def test_nobody_is_killed_before_it_has_drained():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["bray"]
    assert float(compose["stop_grace_period"].rstrip("s")) > seconds(words_of("compose"))
    unit = (DEPLOY / "bray-serve.service").read_text()
    assert float(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1]) > seconds(words_of("systemd"))
    slept = float(pod()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > slept + seconds(words_of("kubernetes"))


def test_the_probes_of_kubernetes_are_answered(service):
    box = pod()["containers"][0]
    ports = {p["name"]: p["containerPort"] for p in box["ports"]}
    assert ports == {"games": 8000, "admin": 8001}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = box[probe]["httpGet"]
        assert asked["port"] == "admin"
        assert admin(service, asked["path"])[0] == 200


def test_files_that_files_name_are_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    built = compose["bray"]["build"]
    assert (DEPLOY / built["context"] / built["dockerfile"]).is_file()
    for name in ("prometheus", "grafana"):
        for volume in compose[name]["volumes"]:
            assert (DEPLOY / volume.split(":")[0]).exists()
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "docker" / "serve.Dockerfile").read_text(), re.M)
    assert all((ROOT / name).exists() for line in copied for name in line.split())


def tool(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here: docs/operating.md says where it comes from")
    return found


def test_systemd_takes_the_unit(tmp_path):
    unit = (DEPLOY / "bray-serve.service").read_text()
    installed = "/opt/bray/.venv/bin/bray"
    assert installed in unit
    here = tmp_path / "bray-serve.service"
    here.write_text(unit.replace(installed, shutil.which("true")))
    done = subprocess.run([tool("systemd-analyze"), "verify", str(here)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [x for x in done.stderr.splitlines() if "bray-serve" in x]) == (0, [])


def test_kubernetes_takes_the_manifests():
    files = sorted(map(str, (DEPLOY / "kubernetes").glob("*.yaml")))
    done = subprocess.run(
        [tool("kubernetes-validate"), "--strict", *files], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules_and_the_metrics(service):
    promtool, folder = tool("promtool"), DEPLOY / "prometheus"
    for words in (["check", "rules", folder / "alerts.yaml"], ["check", "config", folder / "prometheus.yaml"]):
        done = subprocess.run([promtool, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    text = admin(service, "/metrics")[2]
    assert subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60).returncode == 0


# --- OpenAPI ----------------------------------------------------------------------------------------------------------

API = yaml.safe_load((ROOT / "docs" / "openapi.yaml").read_text())


def resolved(node):
    """A part of the file with what its references name in their place."""
    if isinstance(node, dict) and "$ref" in node:
        found = API
        for key in node["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        return resolved(found)
    if isinstance(node, dict):
        return {key: resolved(value) for key, value in node.items()}
    return [resolved(x) for x in node] if isinstance(node, list) else node


def check_reply(path, method, reply):
    """A reply of a server against what the file says of it."""
    status, headers, body = reply
    said = resolved(API["paths"][path][method]["responses"])[str(status)]
    kind = headers["Content-Type"].split(";")[0]
    schema = said["content"][kind]["schema"]
    if kind == "application/json":
        jsonschema.validate(json.loads(body), schema)
    for name in said.get("headers", {}):
        assert status not in (429, 503) or name in headers


@pytest.mark.parametrize(
    ("path", "status", "data"),
    [
        ("/healthz", 200, None),
        ("/readyz", 200, None),
        ("/metrics", 200, None),
        ("/version", 200, None),
        ("/models", 200, None),
        ("/models/{name}", 200, {"pin": None}),
        ("/models/{name}", 400, {"pin": 7}),
    ],
)
def test_the_admin_port_answers_as_openapi_says(service, path, status, data):
    reply = admin(service, path.replace("{name}", "ppo"), data, Authorization="Bearer admin-1")
    assert reply[0] == status
    check_reply(path, "get" if data is None else "post", reply)
    if data is not None:
        refused = admin(service, path.replace("{name}", "ppo"), data)
        assert refused[0] == 401
        check_reply(path, "post", refused)


def step(service, kind, data=b"", token="token-1", session="openapi"):
    headers = {"session": session, "step_kind": kind, "token": token}
    return fetch(f"http://127.0.0.1:{service.port}/step", data, **headers)


def test_a_game_is_answered_as_openapi_says(service):
    replies = [
        (200, step(service, "start")),
        (409, step(service, "start")),
        (200, step(service, "tick", {"obs": OBS})),
        (400, step(service, "tick", {"obs": "text"})),
        (400, step(service, "jump")),
        (413, step(service, "tick", b" " * 200_000)),
        (401, step(service, "tick", {"obs": OBS}, token="token-2")),
        (404, step(service, "tick", {"obs": OBS}, session="nobody")),
        (200, step(service, "end")),
    ]
    assert [status for status, _ in replies] == [reply[0] for _, reply in replies]
    for _, reply in replies:
        check_reply("/step", "post", reply)
    schemas = resolved(API["components"]["schemas"])
    jsonschema.validate(json.loads(replies[2][1][2]), schemas["Decision"])
    jsonschema.validate({"obs": OBS, "reward": 1.0, "terminated": False, "action_mask": [1, 1]}, schemas["Tick"])


def test_openapi_has_every_error_of_the_protocol():
    page = (ROOT / "docs" / "protocol.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (\d{3}) \| (?:no|yes) \|", page, re.M)
    assert len(table) > 15
    responses = resolved(API["paths"]["/step"]["post"]["responses"])
    for code, status in table:
        assert f"`{code}`" in responses[status]["description"]
    assert {status for _, status in table} == responses.keys() - {"200"}


GAME = """
import json, sys
from game_client import AuthenticatedClient, Client
from game_client.api.admin import models, readyz
from game_client.api.games import step
from game_client.models import Error, StepKind, Tick

port, admin_port = sys.argv[1:]
games = AuthenticatedClient(base_url=f"http://127.0.0.1:{port}", token="token-1", prefix="", auth_header_name="token")
with games as client:
    played = {"client": client, "session": "generated"}
    assert step.sync_detailed(**played, step_kind=StepKind.START).status_code == 200
    reply = step.sync(**played, step_kind=StepKind.TICK, body=Tick(obs=[0.01, -0.02, 0.03, 0.04]))
    print(json.loads(reply.payload.read())["action"])
    assert step.sync_detailed(**played, step_kind=StepKind.END).status_code == 200
    gone = step.sync(**played, step_kind=StepKind.TICK, body=Tick(obs=[0, 0, 0, 0]))
    assert isinstance(gone, Error) and gone.error == "no_session", gone
with Client(base_url=f"http://127.0.0.1:{admin_port}") as client:
    assert readyz.sync_detailed(client=client).status_code == 200
    assert [m.name for m in models.sync(client=client)] == ["ppo"]
"""


def test_a_generated_client_plays_a_game(service, tmp_path):
    """openapi-python-client wants another Typer than ours: it is installed in an environment of its own, with its
    script on the PATH."""
    generate = tool("openapi-python-client")
    python = Path(os.path.realpath(generate)).parent / "python"
    words = ["generate", "--path", ROOT / "docs" / "openapi.yaml", "--meta", "none", "--output-path", "game_client"]
    done = subprocess.run([generate, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    ports = [str(service.port), str(service.admin_port)]
    played = subprocess.run([python, "-c", GAME, *ports], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (played.returncode, played.stdout) == (0, f"{service.action}\n"), played.stderr


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "operating.md").read_text()


def test_the_page_names_every_alert_and_files_that_are_there():
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert re.findall(r"^\| `(Bray\w+)` \|", PAGE, re.M) == [rule["alert"] for rule in rules]
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
    for file in re.findall(r"(?<![/\w])(?:deploy|docker|docs)/[\w./-]+\.\w+", PAGE):
        assert (ROOT / file).is_file(), file


def test_the_game_of_the_page_is_played_by_the_generated_client():
    page = PAGE.split("```python\n")[1].split("```")[0]
    played = [line.strip() for line in page.splitlines() if "step.sync" in line]
    assert [re.search(r"StepKind\.(\w+)", line)[1] for line in played] == ["START", "TICK", "END"]
    compile(page, "operating.md", "exec")
