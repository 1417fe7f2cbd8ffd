"""Both ends of the wire for tests: a server with a stub in the learner's place, and bare clients."""

from __future__ import annotations

import collections
import copy
import fcntl
import itertools
import termios
import threading
from pathlib import Path
from typing import Any

import bare
import numpy as np
from children import DEADLINE, Process, until
from gymnasium import spaces

from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.server import Server
from podrace.distributed.net import session_messages
from podrace.distributed.net.listener import Listen
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.checker import Checker
from podrace.types import FIRST, LAST, MID, Arrival

ANY = 'tcp://127.0.0.1:*'


def spec(shape: tuple[int, ...] = (4,), actions: int = 5, dtype: Any = np.float32) -> HostSpec:
  """Spaces as those of host_envs' Sequence, unless told otherwise."""
  high = np.inf if np.dtype(dtype).kind == 'f' else 255
  low = -np.inf if np.dtype(dtype).kind == 'f' else 0

  def no_pool(args: PoolArgs) -> Any:
    raise AssertionError('the learner makes no environments of its own')

  return HostSpec(
    'test:spec', spaces.Box(low, high, shape, dtype), spaces.Discrete(actions, dtype=np.int32),
    no_pool,
  )  # fmt: skip


class Learner:
  """A server, and threads that answer with random actions and keep what arrived."""

  def __init__(
    self,
    kind: HostSpec | None = None,
    slots: int = 8,
    threads: int = 1,
    keys: Path | None = None,
    address: str = ANY,
    max_wait: float = 0.005,
    deadline: float = 30.0,
    peer_timeout: float = 60.0,
    keep: bool = True,
    act: bool = True,
    on_cores: bool = False,
  ) -> None:
    self.said: list[str] = []
    self.levels: list[int] = []  # of these
    listen = Listen(address, keys, peer_timeout=peer_timeout)
    self.say = self.note  # receives the lines of the server
    say = lambda level, line: self.say(level, line)  # noqa: E731
    self.server = Server(listen, slots * threads, max_wait, deadline, on_cores, say)
    self.spec = self.server.spec(kind or spec())
    self.slots, self.keep = slots, keep
    self.arrivals: list[Any] = []
    self.steps = 0
    self.failure: BaseException | None = None
    self.pause = threading.Event()  # cleared: the learner is behind
    self.pause.set()
    self._stop = False
    args = PoolArgs(slots, slots, np.zeros(slots, np.uint32), 1, deadline)
    self.pools = [self.spec.make(args) for _ in range(threads)]
    self._threads = [threading.Thread(target=self._act, args=(p,)) for p in self.pools if act]

  def note(self, level: int, line: str) -> None:
    self.said.append(line)
    self.levels.append(level)

  def has_arrived(self, raw: Raw) -> bool:
    """Whether all that a client has sent since it was answered is there to be read."""
    (peer,) = [p for p in self.server.peers if p.client == raw.client]
    size = np.zeros(1, np.int32)
    fcntl.ioctl(peer.stream.socket, termios.FIONREAD, size)
    return size[0] == raw.out

  def __enter__(self) -> Learner:
    self.server.__enter__()
    for pool in self.pools:
      pool.reset()
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(self, *exc: object) -> None:
    self._stop = True
    self.pause.set()
    for pool in self.pools:
      pool.close()
    for thread in self._threads:
      thread.join(10)
      assert not thread.is_alive()
    self.server.__exit__()
    if self.failure and not exc[0]:
      raise self.failure

  @property
  def address(self) -> str:
    return self.server.address

  def says(self, text: str, deadline: float = DEADLINE) -> None:
    until(lambda: any(text in line for line in self.said), deadline)

  def _act(self, pool: Any) -> None:
    rng = np.random.default_rng(0)
    check = Checker(self.spec, self.slots)
    try:
      while not self._stop:
        arrival = pool.recv()
        check(arrival)
        if not len(arrival.env_id):
          continue
        self.pause.wait()
        if self.keep:
          self.arrivals.append((pool, kept(arrival)))
        self.steps += len(arrival.env_id)
        pool.send(arrival.env_id, rng.integers(0, 5, len(arrival.env_id)).astype(np.int32))
    except BaseException as e:
      if not self._stop:
        self.failure = e


def kept(arrival: Arrival) -> Arrival:
  """With its own observations: the pool's are those of its next batch soon."""
  timestep = arrival.timestep
  observation = copy.deepcopy(timestep.observation)
  return arrival._replace(timestep=timestep._replace(observation=observation))


def lives(arrivals: list[Any]) -> dict[Any, list[Any]]:
  """(pool, slot, run id) -> its rows: (observation, step type), in the order of arrival."""
  found: dict[Any, list[Any]] = collections.defaultdict(list)
  for pool, a in arrivals:
    for i, env in enumerate(a.env_id):
      row = (np.asarray(a.timestep.observation[i]), int(a.timestep.step_type[i]))
      found[id(pool), int(env), int(a.run_id[i])].append(row)
  return found


def assert_whole(of_lives: dict[Any, list[Any]]) -> None:
  """Every life of a slot is one life of one of host_envs' Sequences, without gap or repetition."""
  seen = set()
  for rows in of_lives.values():
    who = {(x[0], x[1]) for x, _ in rows}
    assert len(who) == 1
    assert not who & seen  # nobody is in two lives
    seen |= who
    assert [int(x[2]) for x, _ in rows] == list(range(len(rows)))
    kinds = [k for _, k in rows]
    assert kinds[0] == FIRST
    for one, following in itertools.pairwise(kinds):
      assert (one == LAST) == (following == FIRST)


class Raw(bare.Bare):
  """A client of a few lines, that can be made to say anything."""

  def __init__(
    self, address: str, kind: HostSpec | None = None, keys: Path | None = None, source: str = ''
  ) -> None:
    super().__init__(
      bare.connect(address, {}, keys, source).socket, environment_messages.OF_LEARNERS
    )
    kind = kind or spec()
    self.env = kind.name
    self.schema = environment_messages.schema(kind.observation_space, kind.action_space)
    self.layout = environment_messages.Layout(self.schema)
    self.client = session_messages.new_client()
    self.count = 0
    self.out = 0  # bytes that it has sent since it was answered last

  def send(self, data: bytes) -> None:
    super().send(data)
    self.out += len(data)

  def __enter__(self) -> Raw:
    return self

  def told(self, **changes: Any) -> dict[str, Any]:
    told = session_messages.hello(
      environment_messages.SERVICE, self.client, env=self.env, schema=self.schema
    )
    return {**told, 'host': 'raw', **changes}

  def join_as(self, **changes: Any) -> dict[str, Any]:
    """Says hello; what WELCOME tells."""
    self.say(session_messages.HELLO, self.told(**changes))
    return self.expect(session_messages.WELCOME)[0][0]

  def enter(self, size: int, group: int = 0) -> None:
    self.say(environment_messages.ENTER, group, size)
    assert list(self.expect(environment_messages.START)[0]) == [group]
    self.out = 0

  def body(self, size: int, kind: int = MID, life: int = 0) -> list[bytes]:
    """The bytes of records, and of each array of observations."""
    records = np.zeros(size, environment_messages.RECORD)
    records['step_type'], records['discount'], records['life'] = kind, 1, life
    arrays = [np.full((size, *s), self.count, d) for d, s in self.layout.leaves]
    self.count += 1
    return [x.tobytes() for x in (records, *arrays)]

  def step(self, size: int, seq: int, kind: int = MID, group: int = 0, body: Any = None) -> None:
    arrays = body if body is not None else self.body(size, kind)
    self.say(environment_messages.STEP, group, seq, arrays=arrays)

  def act(self, size: int, seq: int, group: int = 0) -> np.ndarray:
    fields, (data,) = self.expect(environment_messages.ACTION)
    assert list(fields) == [group, seq]
    self.out = 0
    return self.layout.actions(data, size)

  def join(self, size: int) -> None:
    """As far as the first action."""
    self.join_as()
    self.enter(size)
    self.step(size, 0, FIRST)
    self.act(size, 0)


class Envs(Process):
  """`podrace envs`."""

  def __init__(self, address: str, log: Path, *args: str, env: str = '', module: str = '') -> None:
    env = env or 'gymnasium:host_envs:Sequence-v0'
    command = ['-m', 'podrace.cli', 'envs', '--connect', address, '--env', env]
    super().__init__(log, *([module, address] if module else command), *args)
