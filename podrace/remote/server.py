"""The learner's end: one socket, and pools of environments for the actor threads.

One thread at a time has the network, and it is one that waits for environments, if there is any: so that
between a message and its answer there is no other thread. Where all are busy a thread of the server's own
looks after it now and then.

A client's environments come in groups that step together. A group takes slots, as many as it has
environments, in one actor thread's pool; to Sebulba a slot is an environment, and another group in it
is another life of that environment. Everything a client says is checked here: what is not as
docs/protocol.md has it ends the client's session, never the run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
import shlex
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from podrace.envs.host.base import START_SECONDS, HostSpec, PoolArgs, groups_at_once
from podrace.envs.spaces import tree
from podrace.remote import wire
from podrace.remote.hub import PEERS, Hub, Listen, Say, check_hello
from podrace.remote.wire import WireError
from podrace.types import FIRST, LAST, MID, Arrival, TimeStep
from podrace.version import __version__

ENVIRONMENTS = 65536  # of one client, at most
WAITING = 16384  # groups without slots, of all clients
REPORTED = 1000  # clients in a report
IDLE = 0.5  # seconds after which a pool without environments lets its thread look around
GOODBYE = 1.0  # seconds that clients have to answer that the run has ended
CARE = 0.05  # seconds between looks at the network while all actor threads are busy
REMIND = 60.0  # seconds between messages that there are no environments
RESTARTS = 1000  # of an environment between two timesteps, at most; what says more is no count
SAMPLES = 1024  # of latencies, for each client
SLACK = 131072  # bytes of a frame beyond the largest array
BURST = 64  # messages that are read before actor threads have what is in them, at most
TOGETHER = 2**21  # bytes of timesteps that are looked at together, unless a single one has more
ENDED = 0x100  # of a record's flags: `ended`

log = logging.getLogger('podrace.remote')

# --- what the network thread knows ------------------------------------------------------------------


class Latencies:
  """The last seconds of something, and their percentiles."""

  def __init__(self) -> None:
    self._last = np.zeros(SAMPLES)
    self._count = 0
    self._told, self._told_at = (0.0, 0.0), -math.inf

  def add(self, seconds: float) -> None:
    self._last[self._count % SAMPLES] = seconds
    self._count += 1

  def milliseconds(self) -> tuple[float, float]:
    """p50 and p99, of a second ago at most: whoever asks takes time from those who act."""
    now = time.monotonic()
    if self._count and now > self._told_at + 1.0:
      known = np.sort(self._last[: self._count])
      p50, p99 = (float(known[int(q * (len(known) - 1) + 0.5)]) * 1000 for q in (0.5, 0.99))
      self._told, self._told_at = (round(p50, 3), round(p99, 3)), now
    return self._told


class Peer:
  """A client with a session."""

  def __init__(self, address: bytes, session: int, told: dict[str, Any], key: bytes) -> None:
    self.address, self.session, self.key = address, session, key
    self.nonce = told['nonce']
    self.name = f'{wire.label(told["host"])}:{told["pid"]}'
    self.env = wire.label(told['env'])
    self.groups: dict[int, Group] = {}
    self.environments = 0
    self.told_to_wait = False  # of slots that are taken
    self.since = self.last_seen = time.monotonic()
    self.frames = self.restarts = 0
    self.answering, self.stepping = Latencies(), Latencies()


class Group:
  """Environments of a client that step together. ASKED: their timesteps are awaited; COME: they are there, not looked at."""

  def __init__(self, peer: Peer, index: int, size: int) -> None:
    self.peer, self.index, self.size = peer, index, size
    self.state: Literal['waiting', 'asked', 'come', 'thinking', 'gone'] = 'waiting'
    self.pool: RemotePool | None = None
    self.overtaken = 0  # so often, while it was the first of those that wait
    self.slots = np.zeros(0, np.int32)
    self.seq = 0  # of the STEP that is awaited or was the last
    self.since = time.monotonic()  # when its state began

  def begin(self) -> None:
    """It has slots; before, it takes no memory to speak of."""
    size = self.size
    self.state, self.since = 'asked', time.monotonic()
    self.life: np.ndarray = np.zeros(size, np.uint32)
    self.kind: np.ndarray = np.full(size, LAST, np.uint32)  # the last step types
    self.over = True  # some of them are LAST
    self.mids = np.full(size, MID, np.uint32)
    self.run_id: np.ndarray = np.zeros(0, np.int64)  # [n] of its slots

  def accept(self, records: wire.Records) -> np.ndarray | None:
    """Takes what the environments say; how often each [n] was restarted, None if none was.

    Raises:
      WireError: if it can't be.
    """
    kind, life = records.kind, records.life
    if kind.max() > LAST or (records.flags & ~np.uint32(0xFF | ENDED)).any():
      raise WireError('a step type, an end or a zero that is none')
    discount = records.numbers[:, 1]
    if discount.min() < 0 or discount.max() > 1:
      raise WireError('a discount that is not between 0 and 1')
    if records.numbers[kind == FIRST, 0].any():
      raise WireError('a reward with the first timestep of an episode')
    if (records.flags == MID | ENDED).any():
      raise WireError('a game that is over within an episode')
    changed = bool(self.seq) and not np.array_equal(life, self.life)
    restarts: np.ndarray | None = None
    if changed:
      restarts = life - self.life  # of u32, which wraps
      restarts[restarts > RESTARTS] = 1
    if changed or not kind.all() or self.over:  # else nothing begins, nor should
      opens = self.kind == LAST
      if restarts is not None:
        opens |= restarts > 0
      if (kind[opens] != FIRST).any() or ((kind == FIRST) & (self.kind > FIRST) & ~opens).any():
        raise WireError('an episode that begins without its first timestep, or within another')
    self.life, self.kind, self.over = life.copy(), kind, bool(kind.max() == LAST)
    return restarts


class Item(NamedTuple):
  """A group's timesteps, on their way to an actor thread."""

  group: Group
  frames: list[Any]  # as they came
  at: float  # when they came


def _within_episodes(items: list[Item], records: wire.Records) -> list[bool]:
  """Of each whether nothing begins, ends or was restarted in it, as is so most of the time."""
  groups = [item.group for item in items]
  lives = np.concatenate([g.life for g in groups])
  as_before = (records.flags == MID) & (records.numbers[:, 1] == 1) & (records.life == lives)
  if as_before.all():
    return [not g.over for g in groups]
  starts = np.cumsum([0, *(g.size for g in groups[:-1])])
  each = np.logical_and.reduceat(as_before, starts)
  return [bool(x) and not g.over for x, g in zip(each, groups, strict=True)]


# --- an actor thread's end --------------------------------------------------------------------------


class RemotePool:
  """A pool whose environments are somewhere else, and may come and go.

  The observations that `recv` returns are there until it is called again.
  """

  watches_itself = True

  def __init__(self, server: Server, args: PoolArgs) -> None:
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._server = server
    self._changed = threading.Condition()
    self._ready: collections.deque[Item] = collections.deque()
    self._count = 0  # environments in `_ready`
    self._asked = 0  # environments whose timesteps are awaited
    self._inferring: list[Item] = []
    # To get so much memory anew for each batch takes the kernel longer than to copy observations into it.
    self._buffers = server.layout.buffers(args.batch_size)
    self._closed = False
    self.waiting = False  # its thread is in `recv`
    self._nudged = False  # to have the network
    self.batches: collections.Counter[int] = collections.Counter()  # sizes of what `recv` returned
    # Of whoever has the network:
    self.free: list[int] = list(range(args.num_envs))
    self.run_id = np.zeros(args.num_envs, np.int64)
    self.used = np.zeros(args.num_envs, bool)

  # --- whoever has the network

  def put(self, items: list[Item]) -> None:
    environments = sum(item.group.size for item in items)
    with self._changed:
      self._ready.extend(items)
      self._count += environments
      self._asked -= environments
      self._changed.notify()

  def expect(self, environments: int) -> None:
    """So many more, or less, are awaited."""
    with self._changed:
      self._asked += environments
      self._changed.notify()

  def withdraw(self, group: Group) -> bool:
    """Takes back what has not been seen of a group; False if it is being answered."""
    with self._changed:
      if any(item.group is group for item in self._inferring):
        return False
      kept = [item for item in self._ready if item.group is not group]
      if len(kept) < len(self._ready):
        self._server.counts['withdrawn'] += group.size
      self._ready = collections.deque(kept)
      self._count = sum(item.group.size for item in kept)
      return True

  # --- the actor thread

  def reset(self) -> None:
    self._server.call(self._server.pool, self)

  def recv(self) -> Arrival:
    """Those that are there; waits `max_wait` for more, where more than they are awaited.

    So of two groups one steps while the other is acted for, and of many half.
    """
    end = time.monotonic() + IDLE
    self.waiting = True  # before the network is asked for: who gives it back looks at it after
    if self._ready:  # what the last batch had no room for has waited, and more may have come since
      self._server.turn(0.0)
    while (items := self._taken(end)) is None:
      if not self._server.turn(self._left(end)):  # another thread has it, and feeds this pool
        with self._changed:
          if not self._nudged and (left := self._left(end)) > 0:
            self._changed.wait(left)
          self._nudged = False
    self.waiting = False
    self._server.pass_on()
    return self._arrival(items)

  def _left(self, end: float) -> float:
    """Seconds that there is something to wait for."""
    if self._closed or (self._ready and self._count >= min(self.batch_size, self._asked)):
      return 0.0
    with contextlib.suppress(IndexError):  # none is ready
      end = self._ready[0].at + self._server.max_wait
    return end - time.monotonic()

  def _taken(self, end: float) -> list[Item] | None:
    """What is acted on next; None as long as there is something to wait for."""
    with self._changed:
      if self._left(end) > 0:
        return None
      count = groups_at_once((item.group.size for item in self._ready), self.batch_size)
      items = [self._ready.popleft() for _ in range(count)]
      total = sum(item.group.size for item in items)
      self._count -= total
      self._inferring = items
    self.batches[total] += 1
    return items

  def nudge(self) -> None:
    """Has the thread that waits here take the network."""
    with self._changed:
      self._nudged = True
      self._changed.notify()

  def _arrival(self, items: list[Item]) -> Arrival:
    if not items:
      return self._server.nothing
    groups, steps = [item.group for item in items], [item.frames for item in items]
    # A group's are what they are until it is answered.
    ids, run_id = groups[0].slots, groups[0].run_id
    if len(items) > 1:
      ids, run_id = (
        np.concatenate([g.slots for g in groups]),
        np.concatenate([g.run_id for g in groups]),
      )
    layout = self._server.layout
    records, arrays = layout.records(steps), layout.observations(steps, self._buffers)
    observation = tree(self._server.observation_space, iter(arrays))
    timestep = TimeStep(
      observation,
      records.numbers[:, 0].copy(),  # type: ignore[arg-type]
      records.numbers[:, 1].copy(),  # type: ignore[arg-type]
      records.kind.astype(np.int8),  # type: ignore[arg-type]
    )
    return Arrival(ids, timestep, records.numbers[:, 2].copy(), records.flags > 0xFF, run_id)

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Actions for all that the last `recv` returned, in its order."""
    dtype, shape = self._server.layout.action
    action = np.ascontiguousarray(action, dtype).reshape(len(env_id), *shape)
    with self._changed:
      items, self._inferring = self._inferring, []
    if (waiting := sum(item.group.size for item in items)) != len(env_id):
      raise ValueError(f'actions for {len(env_id)} environments, where {waiting} are waiting')
    if items:
      self._server.call(self._server.answer, self, items, action.tobytes())

  def kill(self) -> None:
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._server.wake()

  def close(self) -> None:
    self.kill()
    with contextlib.suppress(RuntimeError):  # which is why it ends
      self._server.call(self._server.unpool, self)


# --- the network ------------------------------------------------------------------------------------


class Server(Hub):
  """Listens while it is entered. `spec` makes a kind of environment one whose pools are remote."""

  def __init__(
    self,
    listen: Listen,
    slots: int,  # of all pools
    max_wait: float = 0.005,  # seconds
    deadline: float = 60.0,
    say: Say = log.log,
  ) -> None:
    super().__init__(listen, say)
    self.max_wait, self._deadline = max_wait, deadline
    self._slots = slots
    self._calls: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = (
      collections.deque()
    )
    self._pools: list[RemotePool] = []
    self._come: list[Item] = []  # not looked at yet
    self._come_bytes = 0
    self._waiting: list[Group] = []  # for slots
    self._assigning = False
    self._told_to_wait: collections.OrderedDict[bytes, None] = collections.OrderedDict()
    self._lonely_since: float | None = None
    self._reminded = 0.0
    self._lead = threading.Lock()  # held by who has the network
    self._thread: threading.Thread | None = None
    self._stop = threading.Event()
    self._closed = self._shut = False
    self._finished = False

  def spec(self, spec: HostSpec) -> HostSpec:
    """The same kind of environment, of which others have the pools."""
    self.observation_space = spec.observation_space
    self.schema = wire.schema(spec.observation_space, spec.action_space)
    self.layout = wire.Layout(self.schema)
    self.env = spec.name
    none = [np.zeros((0, *shape), dtype) for dtype, shape in self.layout.leaves]
    zero: Any = np.zeros(0, np.float32)
    timestep = TimeStep(tree(spec.observation_space, iter(none)), zero, zero, zero.astype(np.int8))
    empty = np.zeros(0, np.int32)
    self.nothing = Arrival(empty, timestep, zero, zero.astype(bool), empty)
    return dataclasses.replace(
      spec,
      name=f'remote {spec.name}',
      make=functools.partial(RemotePool, self),
      ordered_only=False,
      jax=None,
      comes_and_goes=True,
      metrics=self.metrics,
      finished=self.finished,
      try_out=None,
    )

  def __enter__(self) -> Server:
    self.open(self._largest, 2 * wire.GROUPS, 2 * wire.GROUPS)
    self._thread = threading.Thread(target=self._main, name='remote', daemon=True)
    self._thread.start()
    return self

  @property
  def _largest(self) -> int:
    """Bytes of a frame, at most; no group is larger than all slots."""
    return self._slots * self.layout.largest + SLACK

  def finished(self) -> None:
    """The run is complete: clients are told, and need not wait for another. Nobody is served any more."""
    self._finished = True
    self._end()

  def _end(self) -> None:
    self._stop.set()
    if self._thread:
      self._thread.join(5.0)

  def __exit__(self, *exc: object) -> None:
    if self._shut:
      return
    self._shut = True
    self._end()
    if not self._lead.acquire(timeout=5.0):
      raise RuntimeError('a thread does not give back the network')
    self.shut()

  def call(self, do: Callable[..., None], *args: Any) -> None:
    """Does something at once, or has it done by the thread that has the network.

    Raises:
      RuntimeError: if one of them has failed.
    """
    self._calls.append((do, args))
    if not self._as_leader(self._do_calls):
      self.wake()

  def turn(self, wait: float) -> bool:
    """Listens for up to `wait` seconds, and deals with what comes; False if another thread does.

    Raises:
      RuntimeError: if it failed, now or before.
    """
    return self._as_leader(self._turn, wait)

  def pass_on(self) -> None:
    """To a thread that waits for environments, after this one has had the network."""
    for pool in self._pools:
      if pool.waiting:
        pool.nudge()
        return

  def _as_leader(self, do: Callable[..., None], *args: Any) -> bool:
    if self.failure:
      raise RuntimeError(f'the network has failed:\n{self.failure}')
    if self._stop.is_set() or not self._lead.acquire(blocking=False):  # at the end it is `_main`'s
      return False
    try:
      do(*args)
    except BaseException as e:
      self.failure = traceback.format_exc()
      self.log(f'the network failed:\n{self.failure}', logging.ERROR, always=True)
      raise RuntimeError(f'the network failed:\n{self.failure}') from e
    finally:
      self._lead.release()
    return True

  def _turn(self, wait: float) -> None:
    self.poll(wait)
    self._do_calls()
    self._receive_some()
    self.look_at_the_clock()

  def _main(self) -> None:
    """Looks after the network while nobody else does, and takes leave at the end."""
    while not self._stop.wait(CARE):
      with contextlib.suppress(RuntimeError):  # which is told already, and to the actor threads
        self.turn(0.0)
    self.wake()
    with self._lead:
      self._closed = True
      if self.failure is None:
        self._goodbye()

  def _do_calls(self) -> None:
    while self._calls:
      do, args = self._calls.popleft()
      do(*args)

  def _receive_some(self) -> None:
    """What has come, but not for so long that answers wait."""
    for raw in self.received(BURST):
      self.take(raw)
      if self._calls:
        self._do_calls()
    self.settle()

  # --- what clients say

  def dispatch(self, address: bytes, header: list[Any], frames: list[Any], raw: Any) -> None:
    kind = header[0]
    if kind == wire.STEP:
      self._step(address, header, frames)
      return
    self.settle()  # first what was said first
    if address in self._banned:  # for that
      self.counts['ignored'] += 1
      return
    if frames:
      raise WireError(f'{len(frames)} frames after a header of kind {kind}, expected none')
    if kind == wire.HELLO:
      (told,) = wire.fields(header, dict)
      self._hello(address, told, raw)
    elif kind == wire.ENTER:
      session, index, size = wire.fields(header, int, int, int)
      if (peer := self.peer_of(address, session)) is not None:
        self._enter(peer, index, size)
    elif kind == wire.PING:
      (session,) = wire.fields(header, int)
      if self.peer_of(address, session) is not None:
        self.send(address, wire.PONG, session)
    elif kind == wire.BYE:
      session, reason = wire.fields(header, int, str)
      if (peer := self.peer_of(address, session)) is not None:
        self.drop(peer, f'left: {wire.plain(reason)}', logging.INFO)
    elif kind == wire.ASK:
      wire.fields(header)
      self.key_of(raw)
      self.answer_ask(address)
    else:
      raise WireError(f'a header of kind {kind}, which clients have not')

  def _hello(self, address: bytes, told: dict[str, Any], raw: Any) -> None:
    key = self.key_of(raw)
    check_hello(told, 'env')
    peer = self.peers.get(address)
    if peer is not None and peer.nonce == told['nonce'] and self._pools:
      self._welcome(peer)  # asked twice
      return
    if reasons := self._reasons_against(told):
      self.counts['refused'] += 1
      reasons = wire.plain_reasons(reasons)
      who = wire.plain(f'{told["host"]}:{told["pid"]}')
      self.log('\n  '.join([f'refused {who}:', *reasons]), logging.WARNING)
      self.send(address, wire.REFUSED, reasons)
      return
    if self._closed:
      self.send(address, wire.END, self._finished, self._why_over())
      return
    if not self._pools:
      self._wait(address, 'the learner is getting ready')
      return
    self._drop_before(told.get('before', 0), peer, key)
    if len(self.peers) >= PEERS and peer is None:
      self._wait(address, f'the learner has {PEERS} clients and takes no more')
      return
    self._told_to_wait.pop(address, None)
    if peer is not None:
      self.drop(peer, 'said hello anew')
    session = int.from_bytes(os.urandom(7), 'little')
    peer = self.peers[address] = Peer(address, session, told, key)
    self.counts['sessions'] += 1
    if told['env'] == self.env[: wire.STRING]:
      self.log(f'{peer.name} joins with {peer.env}')
    else:
      self.log(
        f'{peer.name} joins with {wire.plain(told["env"])}, this run is of {self.env}: their arrays are alike, '
        'so they take part; end them if that is not what you want',
        logging.WARNING,
      )
    if self._welcome(peer):
      self.connected(address, raw)

  def _drop_before(self, session: int, peer: Peer | None, key: bytes) -> None:
    """Ends the session that this client had over a connection that it knows to be lost, and which seems alive here."""
    if type(session) is not int or not 0 <= session < wire.NUMBER:
      raise WireError('a hello with a session before that is no integer from 0 to 2^63 - 1')
    if not session:
      return
    old = next((p for p in self.peers.values() if p.session == session and p.key == key), None)
    if old is not None and old is not peer:
      self.drop(old, 'is back over another connection', logging.INFO)

  def _wait(self, address: bytes, reason: str) -> None:
    self._told_to_wait[address] = None
    if len(self._told_to_wait) > PEERS:
      self._told_to_wait.popitem(last=False)
    self.send(address, wire.WAIT, reason)

  def _reasons_against(self, told: dict[str, Any]) -> list[str]:
    if told['name'] != wire.NAME or told['version'] != wire.VERSION:
      return [
        f'the learner speaks {wire.NAME} version {wire.VERSION} (podrace {__version__}), '
        f'the environments {told["name"]} version {told["version"]} (podrace {told["podrace"]})'
      ]
    return wire.differences(self.schema, told.get('schema'))

  def _welcome(self, peer: Peer) -> bool:
    return self.send(peer.address, wire.WELCOME, peer.session, {
      'nonce': peer.nonce,
      'largest_group': min(p.batch_size for p in self._pools),
      'silence': self.listen.peer_timeout,
      'env': self.env[: wire.STRING],
    })  # fmt: skip

  def _enter(self, peer: Peer, index: int, size: int) -> None:
    largest = min((p.batch_size for p in self._pools), default=0)
    if index >= wire.GROUPS or index in peer.groups:
      raise WireError(f'group {index}, which is there already or more than {wire.GROUPS - 1}')
    if not 1 <= size <= largest or peer.environments + size > ENVIRONMENTS:
      raise WireError(f'a group of {size} environments, expected 1 to {largest}')
    if len(self._waiting) >= WAITING:
      self.tell_gone(peer, f'{WAITING} groups of environments wait already')
      return
    group = peer.groups[index] = Group(peer, index, size)
    peer.environments += size
    self._waiting.append(group)
    self._assign()
    if group.state == 'waiting' and not peer.told_to_wait:
      peer.told_to_wait = True
      slots = sum(p.num_envs for p in self._pools)
      self.log(
        f'{peer.name}: environments wait until others leave; all {slots} slots (--num-envs) are taken, '
        f'or no {size} of one actor thread are free'
      )

  def _step(self, address: bytes, header: list[Any], frames: list[Any]) -> None:
    session, index, seq, crc = wire.fields(header, int, int, int, int)
    peer = self.peer_of(address, session)
    if peer is None:
      return
    group = peer.groups.get(index)
    if group is not None and group.state == 'gone':  # its actor thread has ended
      return
    if group is None or group.state != 'asked' or group.seq != seq:
      state = f'in turn {group.seq}, {group.state}' if group else 'which has not entered'
      raise WireError(f'timesteps {seq} of group {index}, {state}')
    self.layout.check(frames, group.size, crc)
    now = time.monotonic()
    if seq:
      peer.stepping.add(now - group.since)
    group.state, group.since = 'come', now
    size = sum(map(len, frames))
    if self._come_bytes + size > TOGETHER:
      self.settle()
    self._come.append(Item(group, frames, now))
    self._come_bytes += size

  def settle(self) -> None:
    """Deals with the timesteps that have come: together, as most of what there is to check costs as much for many."""
    items, self._come, self._come_bytes = self._come, [], 0
    if items:
      self._accept(items)

  def _accept(self, items: list[Item]) -> None:
    items = [item for item in items if item.group.state == 'come']  # else dropped since
    if not items:
      return
    steps = [item.frames for item in items]
    try:
      records = self.layout.records(steps)
      if not np.isfinite(records.numbers).all():
        raise WireError('a reward, score or discount that is NaN or infinite')
      self.layout.check_observations(steps)
      within = _within_episodes(items, records)
    except Exception as e:
      if len(items) == 1:
        self.blame(items[0].group.peer.address, e)
        return
      if not isinstance(e, WireError):
        self.unexpected(e)
      for item in items:  # whose is it?
        self._accept([item])
      return
    start = 0
    for item, is_within in zip(items, within, strict=True):
      group = item.group
      stop = start + group.size
      if is_within:
        group.kind = group.mids
      elif group.state == 'come':  # else dropped for another one's
        self._accept_ends(group, wire.Records(records.words[start:stop]))
      start = stop
    self._pass_on([item for item in items if item.group.state == 'come'])

  def _accept_ends(self, group: Group, records: wire.Records) -> None:
    try:
      restarts = group.accept(records)
    except Exception as e:
      self.blame(group.peer.address, e)
      return
    if restarts is not None and group.pool is not None:
      group.pool.run_id[group.slots] += restarts
      group.run_id = group.pool.run_id[group.slots]
      group.peer.restarts += int(restarts.sum())

  def _pass_on(self, items: list[Item]) -> None:
    """To the actor threads."""
    pools: dict[RemotePool, list[Item]] = {}
    for item in items:
      group = item.group
      group.state = 'thinking'
      group.peer.frames += group.size
      self.counts['frames'] += group.size
      assert group.pool is not None
      pools.setdefault(group.pool, []).append(item)
    for pool, those in pools.items():
      pool.put(those)

  # --- what actor threads want

  def pool(self, pool: RemotePool) -> None:
    self._pools.append(pool)
    self._reminded = 0.0
    self._assign()

  def unpool(self, pool: RemotePool) -> None:
    if pool in self._pools:
      self._pools.remove(pool)
    for peer in self.peers.values():  # who keep their sessions, to be told how the run ends
      for group in peer.groups.values():
        if group.pool is pool:
          group.state, group.pool = 'gone', None

  def answer(self, pool: RemotePool, items: list[Item], actions: bytes) -> None:
    """Sends these actions of all their environments, one after the other."""
    start = asked = 0
    for item in items:
      group, peer = item.group, item.group.peer
      data = actions[start : (start := start + group.size * self.layout.action_bytes)]
      if group.state == 'gone':  # while the answer was made
        self._release(group)
        continue
      header = (wire.ACTION, peer.session, group.index, group.seq, wire.checksum([data]))
      now = time.monotonic()
      group.state, group.since = 'asked', now
      group.seq += 1
      asked += group.size
      peer.answering.add(now - item.at)
      self.send(peer.address, *header, frames=[data])
    pool.expect(asked)

  # --- slots

  def _assign(self) -> None:
    """Gives slots to the groups that wait, where there are enough."""
    if self._assigning:  # a client is gone that was to be told; its slots are seen to below
      return
    self._assigning = True
    try:
      while groups := self._give_slots():
        for group in groups:
          if (
            group.state == 'asked'
          ):  # its client has not been dropped since, as one that does not read is
            self.send(group.peer.address, wire.START, group.peer.session, group.index)
    finally:
      self._assigning = False

  def _give_slots(self) -> list[Group]:
    """Those for which there were enough, and which do not wait any more.

    They are served as they came; but what is too little for the first goes to others. Where these were as many
    as there are slots, some have come and gone meanwhile: then nobody overtakes it any more.
    """
    waiting: list[Group] = []
    begun = []
    for group in self._waiting:
      pools = [p for p in self._pools if len(p.free) >= group.size]
      if not pools or (waiting and waiting[0].overtaken >= self._slots):
        waiting.append(group)
        continue
      if waiting:
        waiting[0].overtaken += 1
      pool = max(pools, key=lambda p: len(p.free))
      slots, pool.free = pool.free[: group.size], pool.free[group.size :]
      group.pool, group.slots = pool, np.array(slots, np.int32)
      pool.run_id[slots] += pool.used[slots]  # another life than the one before
      pool.used[slots] = True
      group.begin()
      group.run_id = pool.run_id[slots]
      pool.expect(group.size)
      begun.append(group)
    self._waiting = waiting
    return begun

  def _release(self, group: Group) -> None:
    if group.pool is not None:
      group.pool.free.extend(group.slots.tolist())
      group.pool = None
      self._assign()

  def drop(self, peer: Peer, reason: str, level: int = logging.WARNING) -> None:
    """Ends a session. Unrolls that its environments had begun are dropped with it."""
    if self.peers.get(peer.address) is not peer:
      return
    del self.peers[peer.address]
    self._waiting = [g for g in self._waiting if g.peer is not peer]
    self.counts['dropped'] += 1
    self.log(f'{peer.name} ({peer.environments} environments): {reason}', level)
    for group in peer.groups.values():
      state, group.state = group.state, 'gone'
      if group.pool is None:
        continue
      if state in ('asked', 'come'):
        group.pool.expect(-group.size)
        self._release(group)
      elif group.pool.withdraw(group):
        self._release(group)  # else when it is answered

  # --- time

  def forgive(self, seconds: float) -> None:
    super().forgive(seconds)
    for peer in self.peers.values():
      for group in peer.groups.values():
        group.since = min(group.since + seconds, time.monotonic())

  def tick(self, now: float) -> None:
    super().tick(now)
    for peer in list(self.peers.values()):
      for group in peer.groups.values():
        # A worker that hangs is replaced in the second part, unless the client gives up by itself.
        if group.state == 'asked' and now - group.since > self._deadline + START_SECONDS:
          told = f'group {group.index} has not answered for {now - group.since:.0f} s'
          self.tell_gone(peer, told)
          break
    self._tell_of_loneliness(now)

  def _tell_of_loneliness(self, now: float) -> None:
    """That there are no environments, when it begins and every minute; and when it ends."""
    if not self._pools:
      return
    if any(
      g.state in ('asked', 'thinking') for p in self.peers.values() for g in p.groups.values()
    ):
      if self._lonely_since is not None:
        self.log('environments are here, going on', always=True)
      self._lonely_since = None
      return
    if self._lonely_since is None:
      self._lonely_since, self._reminded = now, 0.0
    if now - self._reminded > REMIND:
      self._reminded = now
      keys = ' --keys DIR' if self._gate else ''
      self.log(
        'no environments are connected; waiting for '
        f'`podrace envs --connect {self.address} --env {shlex.quote(self.env)}{keys}`',
        logging.WARNING, always=True,
      )  # fmt: skip

  def _goodbye(self) -> None:
    for address in {**self.peers, **self._told_to_wait}:
      self.send(address, wire.END, self._finished, self._why_over())
    # A connection that is closed with something unread is reset, and the last words with it.
    end = time.monotonic() + GOODBYE
    while self.peers and (left := end - time.monotonic()) > 0:
      self.poll(left)
      self._receive_some()

  def _why_over(self) -> str:
    return 'the run is complete' if self._finished else 'the learner has stopped'

  # --- what there is to tell

  def report(self) -> dict[str, Any]:
    """What `podrace top` shows; of the network thread."""
    now = time.monotonic()
    clients = [self._told_of(p, now) for p in self.peers.values()]
    return {
      'env': self.env,
      'slots': sum(p.num_envs for p in self._pools),
      'free': sum(len(p.free) for p in self._pools),
      'counts': dict(self.counts),
      'clients': clients[:REPORTED],
      'more_clients': max(len(clients) - REPORTED, 0),
    }

  @staticmethod
  def _told_of(peer: Peer, now: float) -> dict[str, Any]:
    answer, step = peer.answering.milliseconds(), peer.stepping.milliseconds()
    return {
      'name': peer.name,
      'env': peer.env,
      'environments': peer.environments,
      'acting': sum(g.size for g in peer.groups.values() if g.state in ('asked', 'thinking')),
      'frames': peer.frames,
      'seconds': round(now - peer.since, 3),
      'answer_ms': list(answer),
      'step_ms': list(step),
      'restarts': peer.restarts,
      'last_seen_s': round(now - peer.last_seen, 3),
    }

  def metrics(self) -> dict[str, float]:
    """Numbers for metrics.jsonl; from another thread."""
    peers = list(self.peers.values())
    acting = sum(p.num_envs - len(p.free) for p in list(self._pools))
    return {
      'remote_clients': len(peers),
      'remote_envs': acting,
      'remote_dropped': self.counts['dropped'],
      'remote_malformed': self.counts['malformed'],
      'remote_refused': self.counts['refused'] + self.counts['turned away'],
    }
