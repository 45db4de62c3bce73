"""Models with memory that learn from files: rows in order, the memory of a row's past, exact resumes."""

import numpy as np
import pytest
import torch

import bray
from bray.act import Clock
from bray.algos import get_algo
from bray.data import EndOfData
from bray.data.file_windows import Windows
from bray.data.files import write_episodes
from bray.errors import ConfigError
from bray.nn import ModelConfig
from bray.train.source import FileSource
from tests.algos.test_from_files import CHOICE, MASKED, NUMBERS, log_prob

LENGTHS = (5, 3, 7, 1)


def episode(spec, n, rng):
    obs = rng.standard_normal((n + 1, 4)).astype(np.float32)
    ends = np.arange(n) == n - 1
    if spec.layout.continuous:
        action = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    else:
        action = rng.integers(0, 2, n)
    if spec is MASKED:
        mask = rng.random((n + 1, 3)) < 0.5
        mask[np.arange(n), action] = mask[n, 0] = True
        obs = {"obs": obs, "action_mask": mask.astype(np.int8)}
    reward = rng.standard_normal(n).astype(np.float32)
    return {"obs": obs, "action": action, "reward": reward, "terminated": ends, "truncated": np.zeros(n, bool)}


def opened(folder, data, spec=CHOICE, memory=1 << 20, lengths=LENGTHS):
    rng = np.random.default_rng(3)
    played = [episode(spec, n, rng) for n in lengths]
    if not folder.exists():
        write_episodes(folder / "episodes", played)
    data.read_from(FileSource(folder, spec.layout, reads_itself=True), memory)
    data.complete()
    return played


def batches(data):
    while True:
        try:
            yield data.next(Clock())
        except EndOfData:
            return


@pytest.mark.parametrize("memory", [1 << 20, 0])
def test_columns_go_through_whole_episodes_each_once_in_an_epoch(memory, tmp_path):
    data = Windows(8, 4, epochs=3)
    played = opened(tmp_path / "files", data, memory=memory)
    came = list(batches(data))
    assert sum(batch.rows for batch in came) == 3 * sum(LENGTHS)
    joined = {k: np.concatenate([batch.data[k] for batch in came]) for k in came[0].data}
    assert joined["weight"].shape[1] == 2
    found = []
    for b in range(2):
        there = joined["weight"][:, b] > 0
        assert not np.any(np.diff(there.astype(int)) > 0)  # only the end is empty
        column = {k: x[there, b] for k, x in joined.items()}
        starts = np.flatnonzero(column["first"])
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], len(column["first"])], strict=True):
            (i,) = (i for i, e in enumerate(played) if np.array_equal(e["obs"][:-1], column["obs"][start:end]))
            found.append(i)
            rows, reward = slice(start, end), played[i]["reward"]
            np.testing.assert_array_equal(column["action"][rows], played[i]["action"])
            np.testing.assert_array_equal(column["before"][rows], [0, *played[i]["action"][:-1]])
            np.testing.assert_array_equal(column["reward"][rows], reward)
            np.testing.assert_allclose(
                column["to_go"][rows], [reward[t:].sum() for t in range(end - start)], rtol=1e-5, atol=1e-6
            )
    assert sorted(found) == sorted(3 * list(range(len(LENGTHS))))


def test_it_goes_on_exactly(tmp_path):
    whole, other = Windows(8, 4, epochs=3), Windows(8, 4, epochs=3)
    opened(tmp_path / "files", whole)
    opened(tmp_path / "files", other)
    rest = batches(whole)
    next(rest), next(rest)
    other.set_state(whole.get_state(None), None)
    left = list(rest)
    assert len(left) > 2
    for mine, theirs in zip(batches(other), left, strict=True):
        for name, x in mine.data.items():
            np.testing.assert_array_equal(x, theirs.data[name])


# --- BC ---------------------------------------------------------------------------------------------------------------


def memory_model(spec, **model):
    torch.manual_seed(0)
    algo = get_algo("BC")
    config = algo.Config(batch_size=8, lr=1e-9, min_std=0.9, entropy_coef=0.0)
    small = ModelConfig(fcnet_hiddens=(8,), use_lstm=True, lstm_cell_size=8, max_seq_len=4, **model)
    model = algo.make_model(config, spec, small)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return algo.experience(config, spec, small), model, algo.Learner(config, spec, model, small, seed=0, record=False)


@pytest.mark.parametrize("model", [{}, {"recurrent": "gru"}, {"recurrent": "gtrxl", "attention_window": 8}], ids=str)
@pytest.mark.parametrize("spec", [CHOICE, MASKED, NUMBERS], ids=lambda spec: spec.id)
def test_each_row_is_judged_with_the_memory_of_its_episode(spec, model, tmp_path):
    """The mean over a batch of the likelihoods that a policy has that goes through the episodes from their starts."""
    data, network, learner = memory_model(spec, **model)
    data.epochs = 2
    known = {}
    for played in opened(tmp_path / "files", data, spec):
        state = network.initial_state(1)
        for t, action in enumerate(played["action"]):
            obs = played["obs"]
            seen = {k: x[t][None] for k, x in obs.items()} if isinstance(obs, dict) else obs[t][None]
            mask = obs["action_mask"][t] if spec is MASKED else None
            with torch.no_grad():
                out = network(
                    {k: torch.from_numpy(x) for k, x in seen.items()} if spec is MASKED else torch.from_numpy(seen),
                    state,
                )
            state = out["state"]
            numbers = obs["obs"] if spec is MASKED else obs
            known[numbers[t].tobytes()] = log_prob(spec, out["dist"][0].double().numpy(), action, mask, 0.9)
    went_on = 0
    for batch in batches(data):
        obs = batch.data["obs"]["obs"] if spec is MASKED else batch.data["obs"]
        expected = [known[x.tobytes()] for x in obs[batch.data["weight"] > 0]]
        went_on += int((~batch.data["first"][0] & (batch.data["weight"][0] > 0)).sum())
        said = learner.update(batch.data, Clock()).metrics
        assert said["loss"] == pytest.approx(-np.mean(expected), rel=1e-4)
    assert went_on > 1  # batches that begin in the middle of an episode


SPACES = {"obs": "float32[1]", "actions": 2}
SMALL = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4, "batch_size": 64, "lr": 0.02}


@pytest.fixture
def cues(tmp_path):
    """What is to be done is shown in the first observation alone."""

    def one(cue, n=6):
        obs = np.zeros((n + 1, 1), np.float32)
        obs[0] = 2 * cue - 1
        flags = {"terminated": np.arange(n) == n - 1, "truncated": np.zeros(n, bool)}
        return {"obs": obs, "action": np.full(n, cue), "reward": np.ones(n, np.float32), **flags}

    write_episodes(tmp_path / "cues" / "episodes", [one(i % 2) for i in range(40)])
    return tmp_path / "cues"


def test_what_was_seen_before_the_window_is_remembered_and_a_run_goes_on_exactly(cues, tmp_path):
    given = {"run": "BC", "data": cues, "use_preset": False, "config": {**SPACES, **SMALL, "epochs": 30}}
    with bray.Experiment(**given, path=tmp_path / "whole") as whole:
        *_, row = whole.train(stop={"training_iteration": 1000})
        weights = whole.training.weights()
        for cue in (0, 1):
            state, obs = None, np.array([2.0 * cue - 1.0], np.float32)
            for _ in range(6):
                action, state = whole.policy(obs, state)
                assert action == cue
                obs = np.zeros(1, np.float32)
    assert row["loss/policy_loss"] < 0.1
    with bray.Experiment(**given, path=tmp_path / "half") as half:
        list(half.train(stop={"learner_steps_total": 40}))
        assert half.training.learner.steps < 112
    with bray.Experiment.resume(tmp_path / "half") as resumed:
        list(resumed.train(stop={"training_iteration": 1000}))
        for name, x in resumed.training.weights().items():
            np.testing.assert_array_equal(x, weights[name])


@pytest.mark.parametrize("run", ["MARWIL", "IQL"])
def test_others_refuse_a_memory(run, cues, tmp_path):
    with pytest.raises(ConfigError, match=r"single rows.*use_lstm=false"):
        _ = bray.Experiment(run, data=cues, path=tmp_path / "r", config={**SPACES, "use_lstm": True}).training
