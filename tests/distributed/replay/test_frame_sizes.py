"""Of a frame that is larger than any that can be right a service reads nothing; a client does not send it."""

from __future__ import annotations

from typing import Any

import bare
import numpy as np
import pytest
from children import until
from services import ANY
from test_service_tables import SIMPLE, fill

from podrace.distributed import replay
from podrace.distributed.net import session_messages
from podrace.distributed.net.frame import PREFIX
from podrace.distributed.parameters.parameter_messages import SERVICE
from podrace.distributed.parameters.publisher import Publisher
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.server import ReplayServer


@pytest.mark.parametrize(
  ('make', 'name', 'kind', 'most'),
  [
    # Clients of parameters send no arrays.
    (lambda: Publisher(ANY), SERVICE, session_messages.PING, session_messages.GUEST_BYTES),
    (
      lambda: ReplayServer(ANY, most_bytes=2**16),
      replay_messages.SERVICE, replay_messages.INSERT, 2**16 + 2**23 + 2**20,
    ),
  ],
  ids=['parameters', 'replay'],
)  # fmt: skip
def test_larger_frames_end_their_connection(make: Any, name: str, kind: Any, most: int) -> None:
  with make() as made, bare.connect(made.address, replay_messages.OF_SERVICES) as end:
    end.hello(name, 5)
    end.send(PREFIX.pack(most, kind.number | 2 << 8))
    assert end.hear(0.3) is None and made.listener.peers  # it waits for the rest
  with make() as made, bare.connect(made.address, replay_messages.OF_SERVICES) as end:
    end.hello(name, 5)
    end.send(PREFIX.pack(most + 1, kind.number | 2 << 8))
    heard = end.hear()
    assert heard is not None and f' {most}' in heard[1][0]
    assert end.is_closed()


def test_the_default_limit_is_the_page_s() -> None:
  assert ReplayServer(ANY).largest == 2**30


def test_a_larger_item_is_refused_with_both_sizes() -> None:
  with ReplayServer(ANY, most_bytes=2**16) as server, replay.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    writer = client.writer(history=2, rows_per_chunk=1)
    rng = np.random.default_rng(0)
    writer.append({'x': rng.integers(0, 2**62, 3 * 2**20)})
    with pytest.raises(ValueError, match=r'25,165,8.. .* 9,502,720'):
      writer.create_item(table, 1.0, num_steps=1)
      writer.flush(timeout=30)
    assert server.counts['sessions'] == 1  # it did not come back, for ever
    until(lambda: client.connections[0].link.session == 1)
    fill(client, client.table('other', **SIMPLE), 3).close(timeout=30)


def test_references_of_a_message_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(replay_messages, 'MESSAGE_CHUNKS', 8)
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    writer = client.writer(history=9, rows_per_chunk=1)
    writer.extend({'x': np.arange(9)})
    for _ in range(3):  # 15 references, which is more than one message has
      writer.create_item(table, 1.0, num_steps=5)
    writer.flush(timeout=30)
    with pytest.raises(ValueError, match=r'\b9\b.*\b8\b'):
      writer.create_item(table, 1.0, num_steps=9)
      writer.flush(timeout=30)
    assert table.info().inserts == 3 and server.counts['sessions'] == 1


def test_samples_that_wait_are_bounded() -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    most = replay_messages.MOST_REQUESTS
    batches = client.table('it', **SIMPLE).sampler(1, prefetch=most + 1)
    with batches, pytest.raises(ValueError, match=f'{most + 1:,}.*{most:,}'):
      next(batches)
    assert server.counts['sessions'] == 1
