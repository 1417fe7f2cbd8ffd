"""Clients of services that say what is nearly right, or nothing of the kind: they come back, and nothing else."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bare
import numpy as np
import pytest
from mutants import Document, data_of, mutant
from peers import spec

from podrace import tables
from podrace.distributed import parameters, replay
from podrace.distributed.environments import client as remote_client
from podrace.distributed.environments import environment_messages
from podrace.distributed.net import session_messages
from podrace.distributed.net.link import Link, Refused
from podrace.distributed.parameters import parameter_messages, publisher
from podrace.distributed.replay import replay_messages

WELCOME = {'silence': 5.0}


def of_parameters(address: str) -> tuple[Link, Callable[[], Any]]:
  reader = parameters.Parameters(address)
  return reader.link, reader.close


def of_replay(address: str) -> tuple[Link, Callable[[], Any]]:
  client = replay.ReplayClient([address], None, False)
  return client.connections[0].link, client.close


def of_seed(address: str) -> tuple[Link, Callable[[], Any]]:
  options = remote_client.ClientOptions(connect=address, env='test:spec', num_envs=2)
  client = remote_client.EnvironmentClient(options, spec())
  client.link.start()
  return client.link, client.link.close


def parameters_say() -> list[Document]:
  data = np.ones(5).tobytes()
  version = publisher.ParameterVersion(1, [('x', np.ones(5))])
  return [
    (session_messages.WELCOME, [WELCOME], []),
    (session_messages.PONG, [1], []),
    (parameter_messages.NEWEST, [1, version.sha256, [['x', '<f8', [5]]]], [data]),
    (parameter_messages.NEWEST, [2, version.sha256, [['x', '<f8', [5]]]], [b'']),
    (session_messages.END, [False, 'enough'], []),
  ]


def replay_says() -> list[Document]:
  leaf = ['leaf', [], []]
  welcome = dict(WELCOME, number=0, sizes={'it': 3}, largest=2**24, waiting=b'', missing=b'')
  return [
    (session_messages.WELCOME, [welcome], []),
    (session_messages.PONG, [{'it': 4}], []),
    (replay_messages.SIGNATURE, [1, [leaf, [['', '<f4', [], True]]]], []),
    (replay_messages.ACK, [0, '', ], [np.arange(1, 3, dtype='<u8').tobytes(), b'', b'']),
    (replay_messages.SAMPLES, [1, 0, 'why', 3], [b''] * 5),
    (replay_messages.ANSWER, [1, True, {'a': 1}], []),
    (session_messages.GONE, ['enough'], []),
  ]  # fmt: skip


def learner_says() -> list[Document]:
  return [
    (session_messages.WELCOME, [dict(WELCOME, largest_group=8, env='test:spec')], []),
    (session_messages.PONG, [None], []),
    (environment_messages.ACTION, [0, 0], [bytes(4)]),
    (session_messages.GONE, ['enough'], []),
  ]


CASES = {
  'parameters': (of_parameters, parameters_say),
  'replay': (of_replay, replay_says),
  'seed': (of_seed, learner_says),
}


@pytest.mark.parametrize('name', CASES)
def test_a_nearly_right_service_is_tried_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr('podrace.distributed.net.connecting.BACKOFF', (0.0, 0.0))
  make, says = CASES[name]
  end, rng = bare.Accepting(session_messages.of_clients()), random.Random(0)
  link, close = make(end.address)
  seen = 0
  for _ in range(300):
    documents = says()
    last = rng.randrange(len(documents))
    with end.accept(30) as one:
      one.expect(session_messages.HELLO)
      data = b''.join(map(data_of, documents[:last])) + mutant(rng, documents[last])
      one.send(data)
      one.end()  # a frame that has become longer is not waited for
      assert one.is_closed(30)
    with contextlib.suppress(Refused):
      link.check()
    seen += link.number > 0
  assert seen  # some were right
  close()
  end.close()


def test_samples_do_not_answer_another_question() -> None:
  settings: Any = dict(
    sampler=tables.uniform(), remover=tables.fifo(), rate_limiter=tables.min_size(1), max_size=9
  )
  end = bare.Accepting(replay_messages.OF_CLIENTS)
  client = replay.ReplayClient([end.address], None, False)
  welcome = replay_says()[0][1][0]
  with ThreadPoolExecutor(1) as pool:
    made = pool.submit(lambda: client.table('it', **settings))
    with end.welcome(**welcome) as one:
      (number, _, details), _ = one.expect(replay_messages.TABLE)
      one.say(replay_messages.SAMPLES, number, 0, '', 3, arrays=[b''] * 5)
      assert one.is_closed()
    with end.welcome(**welcome) as one:
      (number, _, _), _ = one.expect(replay_messages.TABLE)
      one.say(replay_messages.ANSWER, number, True, dict(settings=details, most=1.0))
      assert made.result().name == 'it'
  client.close()
  end.close()
