"""The wire between a front end and an engine process: frames, start-up messages, the engine's end.

A PAIR socket at an endpoint that the parent has bound; each frame is a msgpack list of `ToEngine`
one way and of `FromProcess` the other. The parent's first words (`Boot`) come as one JSON line on
the engine's stdin, and stdin stays open as the lifeline: when it ends, the parent is gone.

Plain data and a socket; knows no core, no model and no HTTP. A `Channel` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from banyan.engine.messages import FromEngine, ToEngine
from banyan.options import ServeOptions

log = logging.getLogger("banyan.engine")

DEFAULT_BUILD = "banyan.engine.build:build_engine"


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent tells a new engine process.

    Args:
        endpoint: the ZMQ address the parent has bound.
        build: `module:function`, called with the options, that returns an `EngineCore`.
    """

    options: ServeOptions
    endpoint: str
    build: str = DEFAULT_BUILD


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """What the engine is busy with while it starts."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests from now on; `info` is `EngineCore.info`."""

    info: dict[str, Any]


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine could not start. The last three are those of a `ConfigError`, or None."""

    message: str
    option: str | None = None
    problem: str | None = None
    fix: str | None = None


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine's last words: why it stops answering."""

    message: str


FromProcess = FromEngine | Progress | Ready | StartFailed | Fatal


def _plain(value: Any) -> Any:
    """Numpy scalars and the like, as the plain number they hold."""
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_process = msgspec.msgpack.Decoder(list[FromProcess])


def encode(messages: Sequence[ToEngine] | Sequence[FromProcess]) -> bytes:
    """One frame of either direction."""
    return _encoder.encode(messages)


def decode_from_process(frame: bytes) -> list[FromProcess]:
    """The messages of one frame of the engine's."""
    return _from_process.decode(frame)


class Channel:
    """The engine's end of the wire. Sending never blocks: the number of requests bounds it."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(endpoint)
        self.bad_frames = 0

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """All messages that are there, after waiting at most `timeout_ms` for the first.

        A frame that cannot be read is dropped, counted in `bad_frames` and logged.
        """
        messages: list[ToEngine] = []
        if not self._socket.poll(timeout_ms):
            return messages
        with contextlib.suppress(zmq.Again):
            while True:
                frame = self._socket.recv(zmq.NOBLOCK)
                try:
                    messages.extend(_to_engine.decode(frame))
                except msgspec.DecodeError as error:
                    self.bad_frames += 1
                    log.error("dropped a message of %d bytes: %s", len(frame), error)
        return messages

    def send(self, messages: Sequence[FromProcess]) -> None:
        """Send all `messages` as one frame; nothing when there are none."""
        if messages:
            self._socket.send(encode(messages))

    def close(self) -> None:
        """Close after what was sent has left."""
        self._socket.close()
        self._context.term()
