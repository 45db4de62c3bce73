"""What a tick costs to read: values are read by their space, and what cannot be a member is refused before it is
decoded."""

import base64
import json
import tracemalloc

import msgspec
import numpy as np
import pytest

from bray.errors import DataError
from bray.serving.agent import AgentActor
from bray.serving.bounds import Bounds
from bray.serving.policy_actor import TickMessage
from bray.serving.protocol import Refusal
from bray.serving.values import MAX_JSON, Observations, TooMuchText, body_limit, reader
from bray.spec import EnvSpec, Space

CHOICE = Space("discrete", (), "int64", n=(2,), start=(0,))
FOUR = Space("box", (4,), "float32")
BOTH = Space("dict", names=("a", "b"), parts=(FOUR, Space("tuple", parts=(FOUR, CHOICE))))
PAIR = Space("tuple", parts=(CHOICE, CHOICE))
MANY = Space("box", (100_000,), "float64")
BYTES = Space("box", (100_000,), "uint8", 0, 255)
_read_tick = msgspec.json.Decoder(TickMessage).decode


def read(body, observation=FOUR, action=CHOICE, **settings):
    tick = _read_tick(body)
    return Observations(EnvSpec("t", observation, action), **settings).read(tick.obs, tick.action_mask)


def peak(body, observation, action):
    """The most memory that reading took, in bodies; and whether it was refused."""
    observations = Observations(EnvSpec("t", observation, action))
    tracemalloc.start()
    try:
        tick = _read_tick(body)
        observations.read(tick.obs, tick.action_mask)
        refused = False
    except (DataError, msgspec.DecodeError, RecursionError):  # what a PolicyActor answers with 400
        refused = True
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most / len(body), refused


def repeated(piece, n, end=b""):
    return b"[" + piece * n + (end or piece.rstrip(b",")) + b"]"


HOSTILE = {
    "texts": json.dumps(["a" * 20_000] + ["b"] * 20_000).encode(),
    "lists": repeated(b"[],", 100_000),
    "objects": repeated(b"{},", 100_000),
    "numbers": repeated(b"1,", 200_000),
    "floats": repeated(b"1.5,", 100_000),
    "long lists": repeated(repeated(b"1,", 100) + b",", 1000),
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(50_000)) + b"}",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "one long number": b"[1,2,3,0." + b"1" * 300_000 + b"]",
    "base64": b'{"base64":"' + b"AAAA" * 50_000 + b'","shape":' + repeated(b"1,", 50_000) + b"}",
}


@pytest.mark.parametrize("place", ["obs", "action_mask", "terminated", "other"])
@pytest.mark.parametrize("what", HOSTILE)
def test_no_tick_takes_more_than_twelve_times_its_body(what, place):
    members = {b"obs": b"[0,0,0,0]", place.encode(): HOSTILE[what]}
    body = b"{" + b",".join(b'"%b":%b' % member for member in members.items()) + b"}"
    for observation in (FOUR, BOTH):
        for action in (CHOICE, PAIR):
            assert peak(body, observation, action)[0] < 12


@pytest.mark.parametrize("space", [MANY, BYTES])
@pytest.mark.parametrize("piece", [b"1,", b"257,"])
@pytest.mark.parametrize("last", [b"1", b"1e-30", b"true", b"null", b'"1"', b"1,1", b"1e400"])
def test_a_large_array_takes_no_more_either(space, piece, last):
    most, refused = peak(b'{"obs":%b}' % repeated(piece, space.shape[0] - 1, last), space, CHOICE)
    assert most < 12
    if space is MANY:
        assert refused == (last in (b"null", b'"1"', b"1,1", b"1e400"))


@pytest.mark.parametrize("digits", ["1_0", "1", "0x10", "١", "nan", ""])
def test_text_is_no_number(digits):
    for value in (json.dumps([digits, 0, 0, 0]), json.dumps(digits)):
        with pytest.raises(DataError, match="expected numbers of shape"):
            read(b'{"obs":%b}' % value.encode())
        with pytest.raises(DataError, match="expected numbers of shape"):
            reader(FOUR)(json.loads(value))


def test_an_array_in_the_place_of_an_object_is_described():
    read = reader(Space("dict", parts=(Space("box", (2,), "float32"),), names=("obs",)))
    with pytest.raises(DataError, match=r"the keys \['obs'\], got an array of float32, shape \[2\]"):
        read(np.zeros(2, np.float32))


def test_masks_in_all_their_forms():
    def mask(text, action=CHOICE):
        return read(b'{"obs":[0,0,0,0],"action_mask":%b}' % text, action=action)[1]

    raw = json.dumps({"base64": base64.b64encode(bytes([1, 0])).decode(), "dtype": "uint8"}).encode()
    for text in (b"[1,0]", b"[true, false]", b"[1.0,0.0]", raw):
        assert mask(text).tolist() == [True, False]
    assert mask(b"null") is None
    for text in (b"[1,0,0,1]", b"[[1,0],[0,1]]", b" [ [1,0] , [0,1] ]"):
        assert mask(text, PAIR).tolist() == [True, False, False, True]
    for text in (b"[1]", b'["1","0"]', b"{}", b"[[1],[0]]", b"[]", b"3"):
        with pytest.raises(DataError, match="action_mask: expected"):
            mask(text)


def test_numbers_in_text_have_a_limit_and_base64_another():
    values = np.arange(100_000) % 7 / 4 + 1000.0625
    text = json.dumps({"obs": values.tolist()}).encode()
    assert len(text) > MAX_JSON
    with pytest.raises(TooMuchText, match="max_json"):
        read(text, MANY)
    assert read(text, MANY, max_json=4 * MAX_JSON)[0].tolist() == values.tolist()
    raw = json.dumps({"obs": {"base64": base64.b64encode(values.tobytes()).decode()}}).encode()
    assert len(raw) > MAX_JSON
    assert read(raw, MANY)[0].tolist() == values.tolist()
    assert body_limit(EnvSpec("t", MANY, CHOICE)) > len(raw)
    assert body_limit(EnvSpec("t", FOUR, CHOICE)) < 100_000


def test_an_agent_takes_a_mebibyte_of_json_unless_told_otherwise():
    class Agent:
        def __init__(self, name, config, state):
            pass

        def on_tick(self, state):
            state.output["n"] = len(state.input["x"])

    async def tick(**settings):
        actor = AgentActor({"a": Agent}, serialize="json", **settings)
        await actor.start("g", b"")
        return actor.tick(json.dumps({"x": "y" * MAX_JSON}).encode())

    import asyncio

    with pytest.raises(Refusal, match="max_json") as e:
        asyncio.run(tick())
    assert (e.value.status, e.value.code) == (413, "too_large")
    assert asyncio.run(tick(max_json=2 * MAX_JSON)) == b'{"n":%d}' % MAX_JSON


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_the_bounds_of_a_space():
    space = Space(
        "dict",
        names=("image", "angles", "flags", "free", "choice", "pair"),
        parts=(
            Space("box", (2, 2), "uint8", 0, 255),
            Space("box", (2,), "float32", (-1.0, -2.0), 1.0),
            Space("multi_binary", (2,), "int8"),
            Space("box", (3,), "float32"),
            CHOICE,
            Space("tuple", parts=(Space("box", (), "int16", -3, 3), Space("box", (0,), "float32", 0, 1))),
        ),
    )
    bounds = Bounds(space)
    good = {
        "image": np.zeros((2, 2), np.uint8),
        "angles": np.float32([1, -2]),
        "flags": np.int8([0, 1]),
        "free": np.float32([1e30, -1e30, 0]),
        "choice": np.int64(1),
        "pair": (np.int16(3), np.zeros(0, np.float32)),
    }
    assert bounds.outside(good) is None
    for key, bad, said in [
        ("angles", np.float32([0, -2.5]), "obs.angles: -2.5 is not from -2 to 1"),
        ("flags", np.int8([0, 2]), "obs.flags: 2 is not from 0 to 1"),
        ("pair", (np.int16(-4), np.zeros(0, np.float32)), "obs.pair.0: -4 is not from -3 to 3"),
    ]:
        assert bounds.outside({**good, key: bad}) == said
    batch = {k: np.stack([v, v, v]) for k, v in good.items() if k != "pair"}
    batch["pair"] = (np.int16([1, 9, 1]), np.zeros((3, 0), np.float32))
    batch["flags"][1:] = 7
    assert bounds.rows_outside(batch) == 2


@pytest.mark.parametrize(
    "space", [FOUR, Space("box", (3,), "uint8", 0, 255), CHOICE, Space("box", (0,), "float32", 0, 1)]
)
def test_a_space_without_bounds_is_not_looked_at(space):
    assert not Bounds(space)
