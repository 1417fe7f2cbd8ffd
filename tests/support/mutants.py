"""Messages that are nearly right, said to a service by clients, each over a connection of its own."""

from __future__ import annotations

import copy
import gc
import random
import socket as sockets
from collections.abc import Callable, Sequence
from typing import Any

import bare
import msgpack

from podrace.distributed.net import session_messages
from podrace.distributed.net.frame import PREFIX, Kind
from podrace.distributed.net.listener import Listener

Document = tuple[Kind, list[Any], list[bytes]]  # fields, arrays


def nested(depth: int) -> list[Any]:
  found: list[Any] = []
  for _ in range(depth):
    found = [found]
  return found


NONSENSE: list[Any] = [
  None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.5, 1e-320, 1e308,
  float('inf'), float('-inf'), float('nan'), '', 'x', 'x' * 300, '[/x]', '(,)f4,', 'O', '<M8[s]', '<f16',
  'prioritized(nan)', b'', b'\xff' * 9, [], [0, 2**62, 2**62], [[]], {}, {'a': 1}, nested(40), nested(120),
]  # fmt: skip


def data_of(document: Document) -> bytes:
  """A document's bytes."""
  kind, fields, arrays = document
  return b''.join(map(bytes, kind.pack(fields, arrays)))


def mutant(rng: random.Random, document: Document) -> bytes:
  """A document's bytes, of which something is otherwise; sometimes nothing is."""
  kind, fields, arrays = document[0], copy.deepcopy(document[1]), list(document[2])
  sizes_lie = rng.random() < 0.1
  sizes = [len(x) for x in arrays]
  for _ in range(rng.choice([0, 1, 1, 1, 2])):
    if arrays and rng.random() < 0.4:
      i = rng.randrange(len(arrays))
      arrays[i] = _spoiled_bytes(rng, arrays[i])
    elif kind.layout is None and fields:
      spoil(rng, fields)
    elif fields:
      fields[rng.randrange(len(fields))] = rng.choice([0, 1, 7, 2**32 - 1])
  if kind.layout is not None:
    head = kind.layout.pack(*fields)
  elif kind.arrays > 1:
    head = msgpack.packb([*fields, sizes if sizes_lie else [len(x) for x in arrays]])
  else:
    head = msgpack.packb(fields)
  body = head + b''.join(arrays)
  if rng.random() < 0.03:
    body = body[: rng.randrange(len(body) + 1)]
  number = kind.number if rng.random() < 0.98 else rng.randrange(256)
  return PREFIX.pack(len(body), number | len(head) << 8) + body


def _spoiled_bytes(rng: random.Random, array: bytes) -> bytes:
  data = bytearray(array)
  way = rng.randrange(4)
  if way == 0 and data:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  elif way == 1:
    data = data[: rng.randrange(len(data) + 1)]
  elif way == 2:
    data = data * 2
  elif data:
    at = 4 * rng.randrange((len(data) + 3) // 4)
    data[at : at + 4] = rng.choice([b'\0' * 4, b'\xff' * 4, b'\0\0\0\x80'])
  return bytes(data)


def spoil(rng: random.Random, fields: list[Any]) -> None:
  """Puts nonsense somewhere into a list or map, takes something out or doubles it."""
  at: Any = fields
  while True:
    keys = list(at) if isinstance(at, dict) else range(len(at))
    if not keys:
      return
    key = rng.choice(keys)
    if isinstance(at[key], list | dict) and at[key] and rng.random() < 0.8:
      at = at[key]
      continue
    way = rng.randrange(8)
    if way == 0:
      del at[key]
    elif way == 1 and isinstance(at, list):
      at.append(at[key])
    elif way == 2 and type(at[key]) is int:
      at[key] = min(max(at[key] + rng.choice([-1, 1]), 0), 2**64 - 1)
    else:
      at[key] = copy.deepcopy(rng.choice(NONSENSE))
    return


Case = Callable[[random.Random], tuple[Sequence[Document], bytes]]
Hello = Callable[[], dict[str, Any]]


def spoiled(hello: Hello, documents: Callable[[], Sequence[Document]]) -> Case:
  """A mutant of one of the documents of a session, after those before it; or of another hello."""

  def case(rng: random.Random) -> tuple[Sequence[Document], bytes]:
    every = documents()
    sizes = [len(data_of(x)) for x in every]
    chosen = rng.choices(range(len(every) + 1), [*sizes, 50])[0]  # where there is more to spoil
    if chosen == len(every):
      return [], mutant(rng, (session_messages.HELLO, [hello()], []))
    return every[:chosen], mutant(rng, every[chosen])

  return case


def tell(
  listener: Listener, kinds: dict[int, Kind], hello: Hello, case: Case, count: int, seed: int = 0
) -> int:
  """Says so many messages, each in a session of its own after the good ones that `case` gives.

  Sessions that have ended leave no cycles of references: `podrace train` collects them rarely.

  Returns:
    how many of the sessions went on. Fails if a check was missing.
  """
  gc.collect()
  gc.disable()
  try:
    good = _sessions_that_go_on(listener, kinds, hello, case, count, seed)
    assert (left := gc.collect()) < count, f'{left} objects in cycles'
  finally:
    gc.enable()
  return good


def _sessions_that_go_on(
  listener: Listener, kinds: dict[int, Kind], hello: Hello, case: Case, count: int, seed: int
) -> int:
  rng, good = random.Random(seed), 0
  for _ in range(count):
    with bare.connect(listener.address, kinds) as end:
      end.say(session_messages.HELLO, hello())
      end.expect(session_messages.WELCOME, 30)
      before, data = case(rng)
      ping = data_of((session_messages.PING, [None], []))
      end.send(b''.join([*map(data_of, before), data, ping]))
      end.socket.shutdown(sockets.SHUT_WR)  # a frame that has become longer is not waited for
      while (heard := end.hear()) is not None and heard[0] not in (
        session_messages.PONG,
        session_messages.GONE,
      ):
        pass
      good += heard is not None and heard[0] is session_messages.PONG
    assert not listener.counts['unexpected'], next(e for e in listener.lines.events if 'Trace' in e)
  return good
