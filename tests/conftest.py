"""One width for all printed tables, one thread per test process (three processes share two cores: many tests wait for
others), and a place of its own for what is trusted."""

import atexit
import functools
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["COLUMNS"] = "160"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start find the helpers beside this file too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no Ray but those that tests start

if "BRAY_TESTS_STATE" not in os.environ:  # the processes that tests start inherit it
    os.environ["XDG_STATE_HOME"] = os.environ["BRAY_TESTS_STATE"] = tempfile.mkdtemp(prefix="bray-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

SLOW = [
    "test_benchmarks_remote.py::test_rows_that_nobody_played_are_noticed",
    "test_custom_model.py::test_the_code_of_the_page_runs",
    "test_deploy.py::test_a_memory_belongs_to_its_session_and_its_episode",
    "test_envs_waiting.py::test_a_run_says_that_it_is_not_exact_and_resumes_with_new_episodes",
    "test_envs_waiting.py::test_on_policy_algorithms_learn_with_it[A2C]",
    "test_every_way.py::test_by_a_launch_file_in_one_process[a2c]",
    "test_every_way.py::test_by_a_launch_file_in_one_process[dqn]",
    "test_every_way.py::test_by_a_launch_file_in_one_process[memory]",
    "test_every_way.py::test_by_a_launch_file_in_one_process[prioritized]",
    "test_every_way.py::test_by_a_launch_file_in_one_process[sac]",
    "test_every_way.py::test_from_live_games[ppo]",
    "test_every_way.py::test_from_live_games[sac]",
    "test_every_way.py::test_in_the_loop[sac]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[crossq]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[dqn-limits]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[dqn-native]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[dqn-subprocess]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[iqn]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[ppo-subprocess]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[r2d2]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[rainbow]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[sac-inprocess]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[sac-limits]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[sac-subprocess]",
    "test_exact.py::test_interrupted_and_resumed_equals_uninterrupted[td3]",
    "test_exact.py::test_saving_changes_nothing[sac-inprocess]",
    "test_inference_cli.py::test_memory_and_nested_observations",
    "test_inference_export.py::test_graph_answers_like_the_model[a2c-tuple]",
    "test_inference_export.py::test_graph_answers_like_the_model[dqn-dueling-nature]",
    "test_inference_export.py::test_graph_answers_like_the_model[ppo-layers]",
    "test_inference_export.py::test_graph_answers_like_the_model[ppo-lstm-picture]",
    "test_inference_export.py::test_graph_answers_like_the_model[ppo-resized]",
    "test_inference_export.py::test_graph_answers_like_the_model[ppo-same-padding]",
    "test_launch_end.py::test_a_terminal_that_is_closed",
    "test_launch_end.py::test_sigterm_while_games_wait_for_the_trainer",
    "test_live.py::test_every_algorithm_with_a_policy_and_a_learner[SAC-float32[1] -1..1-more3]",
    "test_remote_actor.py::test_a_killed_worker_takes_only_its_own_sessions_with_it[head]",
    "test_remote_actor.py::test_port_workers_slots_protocols_and_gateway[head]",
    "test_remote_actor.py::test_workers_that_do_not_come_back_are_started_anew",
    "test_remote_buffer_ray.py::test_a_killed_reader_goes_on_where_it_was",
    "test_remote_buffer_ray.py::test_sources_are_read_in_processes_of_their_own",
    "test_remote_model_ray.py::test_the_keeper_is_killed_and_the_step_does_not_go_back",
    "test_remote_model_ray.py::test_who_published_last_gives_it_to_a_keeper_that_lost_it",
    "test_remote_trainer.py::test_no_kill_point_leaves_a_broken_checkpoint",
    "test_rnd.py::test_a_resumed_run_goes_on_with_what_is_known[PPO-settings0]",
    "test_serving_faults.py::test_without_files_a_worker_survives_and_serves_again[asyncio]",
    "test_serving_stopped.py::test_requests_for_a_stopped_worker_do_not_pile_up",
    "test_serving_workers.py::test_one_worker_that_cannot_come_back_does_not_end_the_others",
    "test_template.py::test_a_copy_of_the_template_passes_its_own_test",
    "test_template.py::test_the_gamecore_plays_with_a_policy_agent[atari-shape1-6]",
]
"""Long tests beside which a shorter one, or another case, checks the same in `make test`: they are for
`make test-slow`."""


SHARED_RAY = {
    f"test_{name}.py"
    for name in (
        "cluster",
        "loopback",
        "master",
        "remote_actor",
        "remote_buffer_ray",
        "remote_model_ray",
        "remote_source",
        "remote_trainer_ray",
        "template",
        "workers_ray",
    )
}
"""Files whose tests use the Ray of `ray_for_tests`."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One test process runs all files that share a Ray, so that one is started and not three: each costs the CPU half
    a minute."""
    from xdist.scheduler import LoadFileScheduling

    class OneRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "shared Ray" if Path(file).name in SHARED_RAY else file

    return OneRay(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ray ends with the last test that shares it: its processes took a twentieth of a core until all others had run."""
    if item.path.name in SHARED_RAY and (nextitem is None or nextitem.path.name not in SHARED_RAY):
        from tests.ray_for_tests import stop_shared_ray

        stop_shared_ray()


@functools.cache
def _drawn_and_timed() -> tuple[Any, Any]:
    import bray.figures
    import bray.train.settle

    return bray.figures.learning_curve, bray.train.settle.time_step


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What most tests do without, said before fixtures of any scope train.

    A picture at the end of every small training was a twentieth of all tests; those that look at one are marked
    `draws`. A step of each environment that says nothing of it is timed in a process of its own, which imports the test
    and torch with it: 1 to 5 s of CPU, hundreds of times; tests that look at that are marked `times`. TorchScript's
    optimizer takes as long as the rest of a recording; those that look at recordings are marked `optimizes`."""
    import torch

    import bray.figures
    import bray.train.settle

    draw, time_step = _drawn_and_timed()
    marked = {mark.name for mark in item.iter_markers()}
    bray.figures.learning_curve = draw if "draws" in marked else lambda run_dirs, out, *_: out
    bray.train.settle.time_step = time_step if "times" in marked else lambda build: None
    with torch.jit.optimized_execution("optimizes" in marked):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name + item.nodeid.partition(".py")[2] in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _each_rollout_is_an_iteration() -> Iterator[None]:
    """Most tests train a few small rollouts and look at each; one in `test_experience.py` asks what the default does.
    Processes say `iteration_steps=0`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bray.data.rollouts.Rollouts.iteration_steps", 0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _operators_are_read_once() -> Iterator[None]:
    """PyTorch's exporter parses the sources of 500 functions anew for every graph, which is half of an export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_collected() -> None:
    """Many tests collect garbage to see what is gone, and looking through all modules and tests took 0.1 to 0.3 s each.
    What an earlier file has left is looked at no more: its first export alone imports half a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _the_disk_is_not_waited_for() -> Iterator[None]:
    """A process that is killed loses nothing that it has written, and no test takes a machine's power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _exports_are_timed_briefly() -> Iterator[None]:
    """Each `bray export` computes for a second to say how fast its graphs are, which tests do not look at."""
    from bray.inference import verify

    time_forward = verify.time_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "time_forward", lambda *args: time_forward(*args[:3], 0.01))
        yield


@pytest.fixture(autouse=True, scope="session")
def _graphs_are_waited_for() -> Iterator[None]:
    """A graph that is not there when its training ends is written by a process that nobody waits for, but tests do."""
    from bray.serving.graph import GraphExport

    close = GraphExport.close

    def finish(self: GraphExport, goes_on: bool) -> None:
        if goes_on and self.process is not None:
            self.process.wait()
        close(self, goes_on)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphExport, "close", finish)
        yield


@pytest.fixture(autouse=True, scope="session")
def _graphs_are_written_by_forked_processes() -> Iterator[None]:
    """What a process imports to export a graph takes the CPU five times as long as the export of a small one."""

    class Forked:
        PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

        @staticmethod
        def Popen(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
            from tests import forked

            return forked.Popen(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bray.serving.graph.subprocess", Forked)
        yield


@pytest.fixture(autouse=True, scope="session")
def _graphs_are_asked_for() -> Iterator[None]:
    """A training of 20 s exports its graph in a process of its own, and on a busy machine every small one takes 20 s.
    Tests that look at a graph ask for it."""
    from bray.serving.graph import GraphExport
    from bray.train.config import RunConfig

    init = GraphExport.__init__

    def only_if_asked(self: GraphExport, path: Path, after_s: float | None) -> None:
        init(self, path, None if after_s == RunConfig.export_graph_after_s else after_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphExport, "__init__", only_if_asked)
        yield
