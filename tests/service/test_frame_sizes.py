"""Of a frame that is larger than any that can be right a service reads nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq
from podrace.service.router import Router
from services import ANY

from podrace.remote import wire
from podrace.service.parameters import Publisher
from podrace.service.server import ReplayServer


@pytest.mark.parametrize(
  ('make', 'most'),
  [
    (lambda: Publisher(ANY), wire.HEADER_BYTES),  # its clients send no frames
    (lambda: ReplayServer(ANY, most_bytes=2**16), 2**16 + 2**24 + 2**20),
  ],
  ids=['parameters', 'replay'],
)
def test_larger_frames_end_their_connection(make: Callable[[], Router], most: int) -> None:
  with (
    make() as service,
    zmq.Context() as context,
    context.socket(zmq.DEALER) as socket,
    socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ends,
  ):
    socket.linger = 0
    socket.connect(service.address)
    socket.send_multipart([wire.pack(wire.PING, 5), bytes(most)])
    assert socket.poll(30_000) and not ends.poll(0)
    header = wire.unpack(socket.recv())
    assert header[0] == wire.GONE and '1 frames after a header of kind 4' in header[2]
    socket.send_multipart([wire.pack(wire.PING, 5), bytes(most + 1)])
    assert ends.poll(30_000)
    assert service.counts['malformed'] == 1  # it never got as far
    socket.disable_monitor()


def test_by_default_they_may_be_as_large_as_the_page_has_it() -> None:
  assert ReplayServer(ANY).frame_bytes == 2**30
