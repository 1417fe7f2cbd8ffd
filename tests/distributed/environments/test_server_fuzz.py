"""Reports and random, nearly valid or very many messages to a server."""

from __future__ import annotations

import contextlib
import itertools
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from children import until
from mutants import Document, data_of, spoiled, tell
from peers import Learner, Raw
from storm import MESSAGES, storm

from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.groups import ClientState
from podrace.distributed.net import connections, process_metrics, session_messages, sessions
from podrace.distributed.net.dashboard import Asker
from podrace.distributed.net.frame import PREFIX
from podrace.distributed.net.safe_text import label
from podrace.types import FIRST


@pytest.mark.parametrize(
  'seconds', [sessions.REPORT_SECONDS, 0.0], ids=['one for all', 'each anew']
)
def test_many_reports_cost_little(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sessions, 'REPORT_SECONDS', seconds)
  made: list[float] = []
  with Learner() as learner, Raw(learner.address) as raw, Raw(learner.address) as deaf:
    report, counts = learner.server.report, learner.server.counts

    def large() -> dict[str, Any]:
      made.append(time.monotonic())
      return {**report(), 'env': 'x' * 900_000}

    monkeypatch.setattr(learner.server, 'report', large)
    before = memory()
    for _ in range(300):
      deaf.say(session_messages.ASK)
    until(lambda: counts['asked'] == 300)
    assert memory() - before < 50 * 2**20  # else 300 of them wait there
    for _ in range(2):  # some that fitted on the way, and the answer to all those after
      deaf.expect(session_messages.REPORT)
    for _ in range(30):
      raw.say(session_messages.ASK)
      raw.expect(session_messages.REPORT)
    assert all(y - x >= seconds for x, y in itertools.pairwise(made))


def test_a_report_of_the_longest_names_fits() -> None:
  told = dict(host='\U000e0001' * 200, pid=2**63 - 1, env='\U0001f600' * 200)
  with Learner(act=False) as learner:
    filled = threading.Event()

    def fill() -> None:
      for _ in range(1500):
        peer = connections.Peer('here')
        peer.name = f'{label(told["host"])}:{told["pid"]}'
        peer.state = ClientState(told)
        peer.state.environments, peer.state.frames, peer.state.restarts = 65536, 2**62, 2**62
        peer.metrics = {
          f'{"a" * 38}{i}': -(2.0**62) for i in range(10, 10 + process_metrics.MAX_METRICS)
        }
        learner.server.peers[peer] = None
      filled.set()

    learner.server.call(fill)
    assert filled.wait(10)
    asker = Asker(learner.address, None, False)
    report = asker.ask()
    asker.close()
    assert len(report['clients']) == 1000 and report['more_clients'] == 500
    name = report['clients'][0]['name']
    assert name.startswith('\\U000e0001') and name.endswith(f'...:{2**63 - 1}') and len(name) == 220
    learner.server.peers.clear()


def test_a_stranger_that_does_not_read_is_cut_off() -> None:
  with Learner() as learner, Raw(learner.address) as good, Raw(learner.address) as deaf:
    leaf = ['x' * 400, '<f4', [], 'y' * 200, []]
    schema = {'observation': [[f'{i}{leaf[0]}', *leaf[1:]] for i in range(30)], 'action': leaf}
    with contextlib.suppress(OSError):
      for _ in range(20_000):  # until all that there is to hold the answers is full
        deaf.say(session_messages.HELLO, good.told(schema=schema))
    assert not learner.server.counts['malformed'] and learner.server.counts['refused'] < 20_000
    good.join(2)


def garbage(random: random.Random, raw: Raw) -> bytes:
  """A message that is wrong in one of many ways, or a right one at the wrong time."""
  kinds = [1, 2, 3, 4, 5, 6, 0, 65, 200]
  values: list[Any] = [0, 1, -1, 2**63, 3.5, None, True, 'x', b'y' * random.randrange(50), [],
                       [[[[]]]], {'a': 1}, {1: 2}, raw.told(),
                       raw.told(schema=[1]), raw.told(pid='x'), raw.told(host='h' * 300)]  # fmt: skip
  way = random.choices(range(5), [1, 2, 4, 4, 4])[0]
  if way == 0:
    return random.randbytes(random.randrange(60))
  if way == 1:
    fields = [random.choice(values) for _ in range(random.randrange(6))]
    head = msgpack.packb(fields)
    body = head + random.randbytes(random.choice([0, random.randrange(200)]))
    return PREFIX.pack(len(body), random.choice(kinds) | len(head) << 8) + body
  document = (environment_messages.STEP, [random.randrange(2), random.randrange(3)], raw.body(2))
  data = bytearray(data_of(document))
  if way == 2:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
  elif way == 3:
    data = data[: random.randrange(len(data))]
  return bytes(data)


def memory() -> int:
  """Bytes that this process has in memory."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * resource.getpagesize()


def documents(raw: Raw) -> Callable[[], list[Document]]:
  """What a client of a session may say, in an order in which it may say it."""
  body = raw.body(2, FIRST)
  return lambda: [
    (session_messages.PING, [None], []),
    (environment_messages.ENTER, [0, 2], []),
    (environment_messages.STEP, [0, 0], body),
    (session_messages.ASK, [], []),
    (session_messages.BYE, ['enough'], []),
  ]


@pytest.mark.parametrize('count', [1500, pytest.param(200_000, marks=pytest.mark.slow)])
def test_documents_that_are_nearly_right(count: int) -> None:
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as raw:
    before = memory()
    hello = lambda: raw.told(client=session_messages.new_client())  # noqa: E731
    one = learner.server.listener
    good = tell(one, environment_messages.OF_LEARNERS, hello, spoiled(hello, documents(raw)), count)
    assert count / 20 < good < count * 0.9, good
    until(lambda: len(learner.pools[0].free) == 64)
    until(lambda: not learner.server.peers)
    assert memory() - before < 30 * 2**20
    with Raw(learner.address) as last:  # the first has said nothing for too long
      last.join(64)  # the server does what it did


@pytest.mark.parametrize('count', [2000, pytest.param(MESSAGES, marks=pytest.mark.slow)])
def test_a_storm(count: int) -> None:
  """What is nearly right first, then garbage until the connection is cut; a good client goes on."""
  with Learner(keep=False, slots=64) as learner, Raw(learner.address) as good:
    good.join(2)
    template, seq = Raw(learner.address), 0
    hello = lambda: template.told(client=session_messages.new_client())  # noqa: E731
    nearly = spoiled(hello, documents(template))

    def messages(rng: random.Random) -> Iterator[bytes]:
      before, mutant = nearly(rng)
      yield from map(data_of, before)
      yield mutant
      for _ in range(rng.randrange(6)):
        yield garbage(rng, template)

    def go_on() -> None:
      nonlocal seq
      seq += 1
      good.step(2, seq)
      assert good.act(2, seq).shape == (2,)

    told = storm(
      learner.address, environment_messages.OF_LEARNERS, count, hello, messages, go_on, memory
    )
    counts = learner.server.counts
    print(told, dict(counts))
    assert learner.server.failure is None and not counts['unexpected']
    assert told.slowest < 10 and told.megabytes < 20, told
    assert counts['malformed'] > told.connections / 2
    assert any('cut off' in x for x in learner.said)
    assert any('dropped' in x for x in learner.said)
    assert len(learner.said) < 100 + 4 * told.seconds
    until(lambda: (go_on(), len(learner.server.peers) == 1)[1])  # the others are gone
    assert counts['sessions'] == counts['dropped'] + 1
    template.close()


def test_a_huge_frame_ends_the_connection_before_it_is_read() -> None:
  with Learner() as learner, Raw(learner.address) as raw, Raw(learner.address) as good:
    good.join(2)
    raw.join_as()
    before = memory()
    with contextlib.suppress(OSError):  # it is cut off, perhaps while it sends
      raw.send(data_of((environment_messages.STEP, [0, 0], [b'x' * 2**26])))
    for seq in range(1, 100):
      good.step(2, seq)
      good.act(2, seq)
    assert memory() - before < 2**26 + 50 * 2**20  # what the sender has
    assert learner.server.counts['malformed'] == 1 and len(learner.server.peers) == 1


@pytest.mark.slow
def test_a_thousand_light_clients() -> None:
  """Joined at once, each answered within seconds, all forgotten when they are silent."""
  learner = Learner(slots=1000, peer_timeout=5.0, keep=False)
  with learner, contextlib.ExitStack() as stack:
    count = min(1000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 4)
    before = memory()
    raws = [stack.enter_context(Raw(learner.address)) for _ in range(count)]
    for raw in raws:
      raw.say(session_messages.HELLO, raw.told())
    for raw in raws:
      raw.expect(session_messages.WELCOME, 20)
      raw.say(environment_messages.ENTER, 0, 1)
    for raw in raws:
      raw.expect(environment_messages.START, 20)
      raw.step(1, 0, FIRST)
    for raw in raws:
      raw.act(1, 0)
    assert memory() - before < 100 * 2**20  # the clients' own sockets are in it
    assert learner.steps == count
    asker = Asker(learner.address, None, False)
    assert len(asker.ask()['clients']) == count
    asker.close()
    until(lambda: not learner.server.peers)
    assert len(learner.pools[0].free) == 1000


def test_what_fails_in_the_network_thread_is_told() -> None:
  def fails() -> None:
    raise ArithmeticError

  with Learner(act=False) as learner:
    with contextlib.suppress(RuntimeError):  # if this thread is the one that does it
      learner.server.call(fails)
    until(lambda: learner.server.failure)
    with pytest.raises(RuntimeError, match='ArithmeticError'):
      learner.pools[0].recv()
    learner.says('ArithmeticError')
