"""Documents that are nearly right, said to a server by clients that are not ignored yet."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq

from podrace.remote.wire import checksum, pack

Document = tuple[list[Any], list[bytes], int | None]  # header, frames, where the checksum is


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


def mutant(rng: random.Random, document: Document) -> list[bytes]:
  """Its frames, of which something is otherwise; sometimes nothing is."""
  header, frames, crc = copy.deepcopy(document[0]), list(document[1]), document[2]
  for _ in range(rng.choice([0, 1, 1, 1, 2])):
    if frames and rng.random() < 0.4:
      i = rng.randrange(len(frames))
      data = bytearray(frames[i])
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
      frames[i] = bytes(data)
      if crc is not None and rng.random() < 0.9 and crc < len(header):
        header[crc] = checksum(frames)
    else:
      spoil(rng, header)
  if rng.random() < 0.03:
    frames = [*frames, b'further'] if rng.random() < 0.5 else frames[:-1]
  data = pack(*header)
  if rng.random() < 0.03:
    data = data[: rng.randrange(len(data) + 1)]
  return [data, *frames]


def spoil(rng: random.Random, header: list[Any]) -> None:
  """Puts nonsense somewhere into a list or map, takes something out or doubles it."""
  at: Any = header
  while True:
    keys = list(at) if isinstance(at, dict) else range(len(at))
    if not keys:
      return
    key = rng.choice(keys)
    if at is header and key == 0 and rng.random() < 0.8:
      continue  # without its kind it is no message, and nothing else of it is looked at
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


Case = Callable[[random.Random, int], tuple[Sequence[Document], list[bytes]]]


def spoiled(hello: Callable[[], list[Any]], documents: Callable[[int], Sequence[Document]]) -> Case:
  """A mutant of one of the documents of a session, after those before it; or of another hello."""

  def case(rng: random.Random, session: int) -> tuple[Sequence[Document], list[bytes]]:
    every = documents(session)
    sizes = [len(pack(*header)) + sum(map(len, frames)) for header, frames, _ in every]
    chosen = rng.choices(range(len(every) + 1), [*sizes, 50])[0]  # where there is more to spoil
    if chosen == len(every):
      return [], mutant(rng, (hello(), [], None))
    return every[:chosen], mutant(rng, every[chosen])

  return case


class Heard(NamedTuple):
  """Of the messages that were told: how many were read as messages at all, and taken for good."""

  parsed: int
  good: int


ABREAST = 5  # sessions whose mutants come together


def tell(
  server: Any, hello: Callable[[], list[Any]], case: Case, count: int, seed: int = 0
) -> Heard:
  """Says so many messages, each in a session of its own after the good ones that `case` gives.

  So none of them is ignored because of another; but several come before what they say is looked at. Fails if a
  check was missing.
  """
  rng, send, dispatch = random.Random(seed), server.send, server.dispatch
  good, parsed, telling = 0, 0, False

  def take(address: bytes, frames: list[bytes]) -> None:
    server.take([zmq.Frame(x) for x in (address, *frames)])

  def count_it(*args: Any) -> None:
    nonlocal parsed
    parsed += telling
    dispatch(*args)

  def begin() -> tuple[bytes, list[bytes]]:
    address = rng.randbytes(9)
    take(address, [pack(*hello())])
    peer = server.peers[address]
    before, frames = case(rng, peer.session)
    for header, more, _ in before:
      take(address, [pack(*header), *more])
    server.settle()
    assert server.peers.get(address) is peer
    return address, frames

  def few() -> None:
    nonlocal good, telling
    begun = [begin() for _ in range(ABREAST)]
    telling = True
    for address, frames in begun:
      take(address, frames)
    server.settle()
    telling = False
    for address, _ in begun:
      good += address not in server._banned
      if (left := server.peers.get(address)) is not None:
        server.drop(left, 'enough')

  def some() -> None:
    server.send = lambda address, *header, **frames: bool(pack(*header))  # to nobody
    server.dispatch = count_it
    try:
      for _ in range(100 // ABREAST):
        few()
    except BaseException as e:
      wrong.append(e)
    finally:
      server.send, server.dispatch = send, dispatch
      done.set()

  wrong: list[BaseException] = []
  for _ in range(count // 100):
    done = threading.Event()
    server.call(some)
    assert done.wait(120)
    if wrong:
      raise wrong[0]
    assert not server.counts['unexpected'], next(e for e in server.events if 'Traceback' in e)
    assert server.failure is None, server.failure
  return Heard(parsed, good)
