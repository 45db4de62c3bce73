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


def episode(spec, n, rng, cut=False):
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
    no = np.zeros(n, bool)
    return {"obs": obs, "action": action, "reward": reward, "terminated": no if cut else ends, "truncated": ends & cut}


def opened(folder, data, spec=CHOICE, memory=1 << 20, lengths=LENGTHS, cut=False):
    """`cut`: every other one."""
    rng = np.random.default_rng(3)
    played = [episode(spec, n, rng, cut and i % 2 == 0) for i, n in enumerate(lengths)]
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


def test_returns_to_the_end_and_the_observation_that_an_episode_was_cut_at(tmp_path):
    data = Windows(8, 4, gamma=0.5)
    played = opened(tmp_path / "files", data, cut=True)
    came = list(batches(data))
    columns = {k: np.concatenate([batch.data[k] for batch in came]) for k in came[0].data}
    counts, rows, ends = columns["weight"] > 0, 0, 0
    for e in played:
        n = len(e["reward"])
        for t in range(n + 1):
            ((at, b),) = np.argwhere((columns["obs"] == e["obs"][t]).all(-1)) if t < n or cut_at_end(e) else ((-1, -1),)
            if t < n:
                assert columns["reward"][at, b] == pytest.approx(sum(e["reward"][t:] * 0.5 ** np.arange(n - t)), 1e-5)
                assert columns["discount"][at, b] == (0.5 ** (n - t) if cut_at_end(e) else 0.0)
                assert counts[at, b]
                rows += 1
            elif at >= 0:
                assert not counts[at, b]
                np.testing.assert_array_equal(columns["obs"][at - 1, b], e["obs"][n - 1])
                ends += 1
    assert (rows, ends) == (sum(LENGTHS), 2)
    assert counts.sum() == rows


def cut_at_end(e):
    return bool(e["truncated"][-1])


# --- BC ---------------------------------------------------------------------------------------------------------------


def memory_model(spec, run="BC", options=None, **model):
    torch.manual_seed(0)
    algo = get_algo(run)
    config = algo.Config(batch_size=8, lr=1e-9, min_std=0.9, entropy_coef=0.0, **(options or {}))
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


@pytest.mark.parametrize("spec", [CHOICE, MASKED, NUMBERS], ids=lambda spec: spec.id)
def test_marwil_weighs_by_values_that_remember(spec, tmp_path):
    """The loss of each batch, of what a policy says that goes through the episodes from their starts. The value where
    an episode was cut is that of its last observation as soon as a batch has it, else that of the batch's last row."""
    options = {"beta": 1.5, "gamma": 0.9, "value_coef": 0.7, "norm_rate": 0.2, "max_weight": 1.5}
    data, network, learner = memory_model(spec, "MARWIL", options)
    data.epochs, known = 2, {}
    for played in opened(tmp_path / "files", data, spec, cut=True):
        state, obs, n = network.initial_state(1), played["obs"], len(played["reward"])
        for t in range(n + 1):
            seen = {k: torch.from_numpy(x[t][None]) for k, x in obs.items()} if spec is MASKED else obs[t][None]
            with torch.no_grad():
                out = network(seen if spec is MASKED else torch.from_numpy(seen), state)
            state, mask = out["state"], obs["action_mask"][t] if spec is MASKED else None
            dist = out["dist"][0].double().numpy()
            logp = log_prob(spec, dist, played["action"][t], mask, 0.9) if t < n else 0.0
            known[(obs["obs"] if spec is MASKED else obs)[t].tobytes()] = logp, float(out["value"])
    square = weight_of_square = stood_in = found = 0.0
    for batch in batches(data):
        d = batch.data
        seen, errors, logps = d["obs"]["obs"] if spec is MASKED else d["obs"], [], []
        for t, b in np.argwhere(d["weight"] > 0):
            later = [s for s in range(t, len(seen)) if d["weight"][s, b] == 0]
            end = later[0] if later else -1
            logp, value = known[seen[t, b].tobytes()]
            cut = known[seen[end, b].tobytes()][1] if d["discount"][t, b] else 0.0
            stood_in, found = stood_in + (d["discount"][t, b] > 0 and end < 0), found + (cut != 0.0 and end >= 0)
            errors.append(d["reward"][t, b] + d["discount"][t, b] * cut - value)
            logps.append(logp)
        square = 0.8 * square + 0.2 * np.mean(np.square(errors))
        weight_of_square = 0.8 * weight_of_square + 0.2
        weights = np.minimum(np.exp(1.5 * np.array(errors) / np.sqrt(square / weight_of_square)), 1.5)
        said = learner.update(d, Clock()).metrics
        assert said["policy_loss"] == pytest.approx(-np.mean(weights * logps), rel=1e-4)
        assert said["value_loss"] == pytest.approx(0.5 * np.mean(np.square(errors)), rel=1e-4)
    assert stood_in
    assert found


def test_iql_refuses_a_memory(cues, tmp_path):
    with pytest.raises(ConfigError, match=r"single rows.*use_lstm=false"):
        _ = bray.Experiment("IQL", data=cues, path=tmp_path / "r", config={**SPACES, "use_lstm": True}).training
