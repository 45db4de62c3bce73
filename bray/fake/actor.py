"""A game service that knows nothing: fixed replies, to develop a game against before there is an agent."""

from __future__ import annotations

from dataclasses import dataclass

from bray.serving.actor import Actor


@dataclass
class Replies:
    """What a FakeActor answers."""

    start: bytes = b"fake_actor_start_return"
    tick: bytes = b"fake_actor_tick_return"
    end: bytes = b"fake_actor_end_return"
    echo: bool = False
    """Answer a tick with its own body instead."""


class FakeActor(Actor):
    """Answers every session alike."""

    def __init__(self, replies: Replies | None = None):
        self.replies = replies or Replies()

    def start(self, session: str, data: bytes) -> bytes:
        return self.replies.start

    def tick(self, data: bytes) -> bytes:
        return data if self.replies.echo else self.replies.tick

    def end(self, data: bytes) -> bytes:
        return self.replies.end
