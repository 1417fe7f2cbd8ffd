"""The environments' end: `podrace envs`. Imports no JAX.

Environments are stepped in groups, each by a thread of its own, so that some step while the learner
infers for others. The main thread has the network, says that it is alive, and comes back
after whatever happens to the connection or the learner.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import queue
import random
import signal
import socket as sockets
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from podrace.envs.host import base as host
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.spaces import values
from podrace.process import on_signals
from podrace.remote import security, wire
from podrace.remote.dial import CUT, NOTHING_KNOWN, Connection
from podrace.remote.wire import WireError
from podrace.types import Arrival
from podrace.version import __version__

HELLO_SECONDS = 1.0  # between attempts to get a session
REMIND = 30.0  # seconds between messages that there is none
LOST_SECONDS = 0.3  # from when the learner reads nothing that it is sent to giving up
END_SECONDS = 10.0  # that threads have to end their pools

log = logging.getLogger('podrace.remote')


class Refused(ValueError):
  """The learner does not take these environments; the message has both sides."""


class Failed(Exception):
  """An environment failed, or hangs."""


@dataclasses.dataclass(frozen=True)
class Options:
  """What `podrace envs` is told."""

  connect: str
  env: str
  num_envs: int = 1
  workers: int = 0  # threads or processes that step; 0: two a core, of a group at most one a core
  groups: int = 0  # 0: two, or as many as the learner's size of groups asks for
  seed: int | None = None
  keys: Path | None = None
  insecure: bool = False
  deadline: float = 60.0  # seconds that environments may take for a step
  give_up: float = 0.0  # seconds without a learner after which to end; 0: never

  def __post_init__(self) -> None:
    security.check_address(self.connect, self.keys, self.insecure, '--connect')
    for name in ('num_envs', 'workers', 'groups'):
      least = 1 if name == 'num_envs' else 0
      if getattr(self, name) < least:
        flag = name.replace('_', '-')
        raise ValueError(f'--{flag} must be at least {least}, not {getattr(self, name)}')
    if not (0 < self.deadline < math.inf and 0 <= self.give_up < math.inf):
      raise ValueError(
        f'--env-deadline must be more than 0, not {self.deadline}, and --give-up-after not negative, '
        f'not {self.give_up}'
      )


def make_spec(name: str) -> HostSpec:
  """The environments; those in JAX stay with the learner.

  Raises:
    ValueError: if there are none of that name, or they need JAX.
  """
  library = name.partition(':')[0]
  if library not in host.registry.HOST_LIBRARIES:
    known = ', '.join(host.registry.HOST_LIBRARIES)
    raise ValueError(f'--env {name}: remote environments are those of {known}')
  return host.make(name)


# --- groups -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outgoing:
  """What a group has to say."""

  group: Group
  frames: list[Any]
  error: str | None = None


class Group:
  """Environments that step together, in a thread of their own, for one session."""

  def __init__(self, index: int, spec: HostSpec, args: PoolArgs, tell: Callable[[Outgoing], None]):
    self.index, self.size, self._spec, self._args, self._tell = (
      index, args.num_envs, spec, args, tell,
    )  # fmt: skip
    self.seq = 0
    self.busy_since: float | None = None
    self.watches_itself = False
    self._actions: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    self.busy_since = time.monotonic() + 60.0  # to make them takes its time
    self._thread = threading.Thread(target=self._main, name=f'group-{self.index}', daemon=True)
    self._thread.start()

  @property
  def started(self) -> bool:
    return self._thread is not None

  def act(self, action: np.ndarray) -> None:
    self.busy_since = time.monotonic()
    self._actions.put(action)

  def stop(self) -> None:
    self._actions.put(None)

  def join(self, seconds: float) -> bool:
    """Whether the thread has ended."""
    if self._thread is not None:
      self._thread.join(seconds)
    return self._thread is None or not self._thread.is_alive()

  def _main(self) -> None:
    pool = None
    try:
      pool = self._spec.make(self._args)
      self.watches_itself = pool.watches_itself
      ids = np.arange(self.size, dtype=np.int32)
      pool.reset()
      self._send(pool.recv(), ids)
      while (action := self._actions.get()) is not None:
        pool.send(ids, action)
        self._send(pool.recv(), ids)
    except BaseException as e:
      plain = isinstance(e, host.HostError) and not os.environ.get('PODRACE_TRACEBACK')
      self._tell(Outgoing(self, [], str(e) if plain else traceback.format_exc()))
    finally:
      if pool is not None:
        pool.close()

  def _send(self, arrival: Arrival, ids: np.ndarray) -> None:
    if not np.array_equal(arrival.env_id, ids):
      raise Failed(f'{self._spec.name} returned {arrival.env_id}, expected all in order')
    timestep = arrival.timestep
    records = np.zeros(self.size, wire.RECORD)
    records['life'] = arrival.run_id
    records['reward'], records['discount'] = timestep.reward, timestep.discount
    records['score'], records['ended'] = arrival.score, arrival.ended
    records['step_type'] = timestep.step_type
    space = self._spec.observation_space
    arrays = [np.ascontiguousarray(x) for x in values(space, timestep.observation)]
    self._tell(Outgoing(self, [records.view(np.uint8).data, *(_bytes(x) for x in arrays)]))


def _bytes(x: np.ndarray) -> Any:
  """An array's memory, without copying."""
  return x.reshape(-1).view(np.uint8).data


# --- the network ------------------------------------------------------------------------------------


class Client:
  """One process with environments."""

  def __init__(self, options: Options, spec: HostSpec) -> None:
    self._options, self._spec = options, spec
    self._env = spec.name[: wire.STRING]
    self._schema = wire.schema(spec.observation_space, spec.action_space)
    self._layout = wire.Layout(self._schema)
    self._context = security.new_context()
    self._connection: Connection | None = None
    self._wake = wire.Wake()
    self._outgoing: collections.deque[Outgoing] = collections.deque()
    self._session: int | None = None
    self._before = 0  # the session that was lost last, whose slots the learner may hold still
    self._nonce = 0
    self._lost_since = 0.0  # when something could not be sent
    self._silence = 5.0
    self._groups: list[Group] = []
    self._lives = 0
    self._heard = self._pinged = self._alone_since = time.monotonic()
    self._told = 0.0
    self._last_reason = ''
    self._why = NOTHING_KNOWN  # there is no session
    self._waits = 0
    self.signum = 0
    self.over = False

  def run(self) -> None:
    """Until the run is complete.

    Raises:
      Refused, Failed: see there.
      TimeoutError: if there was no learner for `give_up` seconds.
    """
    try:
      while not self.over and not self.signum:
        if self._connection is None:
          self._connect()
        self._turn()
    finally:
      self._leave()

  def _connect(self) -> None:
    self._connection = Connection(
      self._context, self._options.connect, security.client_keys(self._options.keys),
      sends=2 * wire.GROUPS, receives=1000, patience_ms=2000,
      largest=max(wire.HEADER_BYTES, 65536 * self._layout.action_bytes) + 65536,
    )  # fmt: skip
    self._nonce, self._lost_since = random.getrandbits(48), 0.0
    self._heard = time.monotonic()
    self._pinged = 0.0

  def _turn(self) -> None:
    """Waits for the network or for a group, and does what there is to do."""
    connection = self._connection
    assert connection is not None
    poller = zmq.Poller()
    for socket in (connection.socket, connection.monitor, self._wake):
      poller.register(socket, zmq.POLLIN)
    while self._connection is not None and not self.over and not self.signum:
      told = any(socket is connection.monitor for socket, _ in poller.poll(200))
      self._wake.clear()
      while self._connection is not None and (frames := connection.receive()) is not None:
        try:
          self._message(frames)
        except WireError as e:
          self._lose(f'the learner sent {e}')
      # All that it still said has been heard, perhaps that it is over.
      event = connection.event() if told and self._connection is not None else 0
      if event and event != CUT:
        self._why = connection.why
      if event == CUT and not self.over:
        if self._session is not None:
          self._lose('the connection was cut')
        else:  # a HELLO may be lost with it
          self._pinged = 0.0
      self._send_outgoing()
      self._look_at_the_clock()

  # --- what the server says

  def _message(self, frames: list[Any]) -> None:
    header = wire.unpack(frames[0])
    self._heard = time.monotonic()
    kind = header[0]
    if kind == wire.ACTION:
      session, index, seq, crc = wire.fields(header, int, int, int, int)
      if session == self._session:
        self._act(index, seq, crc, frames[1:])
    elif kind == wire.START:
      session, index = wire.fields(header, int, int)
      if session == self._session:
        if index >= len(self._groups) or self._groups[index].started:
          raise WireError(f'a start of group {index}, which there is not or has begun')
        self._groups[index].start()
    elif kind == wire.WELCOME:
      session, told = wire.fields(header, int, dict)
      if self._session is None and told.get('nonce') == self._nonce:
        self._join(session, told)
    elif kind == wire.WAIT:
      (reason,) = wire.fields(header, str)
      self._alone_since = time.monotonic()
      self._remind(f'waiting: {wire.plain(reason)}')
    elif kind == wire.REFUSED:
      (reasons,) = wire.fields(header, list)
      raise Refused(
        f'the learner at {self._options.connect} refused {self._spec.name}:\n  '
        + '\n  '.join(wire.plain_reasons(reasons))
      )
    elif kind == wire.GONE:
      session, reason = wire.fields(header, int, str)
      if session == self._session or session == 0:
        self._lose(f'the learner ended the session: {wire.plain(reason)}')
    elif kind == wire.END:
      complete, reason = wire.fields(header, bool, str)
      self._bye('the learner has ended')
      if complete:
        log.info('%s', wire.plain(reason))
        self.over = True
      else:
        self._lose(wire.plain(reason))

  def _join(self, session: int, told: dict[str, Any]) -> None:
    """Begins a session, with environments made anew when they get slots."""
    try:
      largest, silence, env = told['largest_group'], float(told['silence']), str(told['env'])
    except (KeyError, TypeError, ValueError) as e:
      raise WireError(f'a welcome without {e}') from None
    if type(largest) is not int or largest < 1 or not 0 < silence < math.inf:
      raise WireError(
        f'a welcome with groups of {largest!r} environments and {silence} s of silence'
      )
    o, self._silence = self._options, silence
    sizes = group_sizes(o.num_envs, o.groups, largest)
    seeds = np.random.SeedSequence(None if o.seed is None else [o.seed, self._lives])
    self._lives += 1
    self._session = session
    # While the learner acts for one group the other has the cores: two groups have them all, each.
    workers = o.workers // len(sizes) if o.workers else min(cores(), 2 * cores() // len(sizes))
    self._groups = []
    for i, (size, seed) in enumerate(zip(sizes, seeds.spawn(len(sizes)), strict=True)):
      args = PoolArgs(size, size, seed.generate_state(size, np.uint32), max(1, workers), o.deadline)
      self._groups.append(Group(i, self._spec, args, self._tell))
    self._told, self._last_reason, self._lost_since = 0.0, '', 0.0
    log.info(
      'joined the learner of %s with %d environments in %d groups',
      wire.plain(env), o.num_envs, len(sizes),
    )  # fmt: skip
    if env != self._env:
      log.warning(
        'these environments are %s, the learner is one of %s: their arrays are alike, so they take part; '
        'give --env %s if that is not what you want', self._env, *[wire.plain(env)] * 2,
      )  # fmt: skip
    for group in self._groups:
      self._send(wire.ENTER, session, group.index, group.size)

  def _act(self, index: int, seq: int, crc: int, frames: list[Any]) -> None:
    if index >= len(self._groups) or self._groups[index].seq != seq:
      raise WireError(f'actions {seq} for group {index}, which has not asked for them')
    group = self._groups[index]
    actions = self._layout.actions(frames, group.size, crc)
    group.seq += 1
    group.act(actions)

  # --- what groups say

  def _tell(self, outgoing: Outgoing) -> None:
    self._outgoing.append(outgoing)
    self._wake.set()

  def _send_outgoing(self) -> None:
    while self._outgoing:
      out = self._outgoing.popleft()
      if out.error is not None:
        if out.group in self._groups:
          raise Failed(f'{self._spec.name} failed:\n{out.error}')
        continue
      if self._session is None or out.group not in self._groups:
        continue  # of a session that is over
      out.group.busy_since = None
      crc = wire.checksum(out.frames)
      header = (wire.STEP, self._session, out.group.index, out.group.seq, crc)
      self._send(*header, frames=out.frames)

  def _send(self, *header: Any, frames: list[Any] | None = None) -> bool:
    assert self._connection is not None
    try:
      # Frames beyond pyzmq's threshold (64 KiB) go out from where they are; nobody writes there.
      self._connection.socket.send_multipart(
        [wire.pack(*header), *(frames or [])], zmq.NOBLOCK, copy=False
      )
    except zmq.Again:  # perhaps there is something to read that says why
      self._lost_since = self._lost_since or time.monotonic()
      return False
    return True

  # --- time

  def _look_at_the_clock(self) -> None:
    if self._connection is None:
      return
    now = time.monotonic()
    if self._session is not None and self._lost_since and now - self._lost_since > LOST_SECONDS:
      self._lose('the connection is lost')
      return
    if self._session is None:
      if self._connection.ready and now - self._pinged > HELLO_SECONDS and self._hello():
        self._pinged = now
      if now - self._alone_since > REMIND / 3:
        self._remind(f'no learner answers at {self._options.connect}: {self._why}; trying again')
      give_up = self._options.give_up
      if give_up and now - self._alone_since > give_up:
        raise TimeoutError(
          f'no learner at {self._options.connect} for {give_up:.0f} s: {self._why}'
        )
      if now - self._heard > security.NEW_SOCKET_SECONDS:  # turned away, perhaps
        self._hang_up()
      return
    self._alone_since = now
    if now - self._pinged > self._silence / 4:
      self._pinged = now
      self._send(wire.PING, self._session)
    if now - self._heard > 2 * self._silence:
      self._lose(f'the learner has been silent for {now - self._heard:.1f} s')
    for group in self._groups:
      since = group.busy_since
      if since is not None and not group.watches_itself and now - since > self._options.deadline:
        raise Failed(f'{self._spec.name}: no answer for {now - since:.0f} s')

  def _hello(self) -> bool:
    return self._send(wire.HELLO, {
      'name': wire.NAME,
      'version': wire.VERSION,
      'nonce': self._nonce,
      'before': self._before,
      'host': sockets.gethostname()[: wire.STRING],
      'pid': os.getpid(),
      'env': self._env,
      'podrace': __version__,
      'schema': self._schema,
    })  # fmt: skip

  def _remind(self, message: str) -> None:
    """Says what is being waited for, when it begins and every half minute."""
    now = time.monotonic()
    if message != self._last_reason or now - self._told > REMIND:
      self._told, self._last_reason = now, message
      log.warning('%s', message)

  # --- ends

  def _lose(self, reason: str) -> None:
    """Ends the session; the next turn begins with a new connection."""
    if self._session is not None:
      log.warning('%s; environments begin anew when it is back', reason)
    else:
      self._remind(reason)
    self._before = self._session or self._before
    self._session = None
    self._alone_since = time.monotonic()
    self._hang_up()
    self._end_groups()
    self._waits = min(self._waits + 1, 5)
    time.sleep(0.1 * random.random() * self._waits)  # all clients lose a learner together

  def _end_groups(self) -> None:
    groups, self._groups = self._groups, []
    for group in groups:
      group.stop()
    # Those that watch themselves may have just begun to replace one that hangs.
    allowed = self._options.deadline + host.START_SECONDS * any(g.watches_itself for g in groups)
    end = time.monotonic() + (allowed if groups else 0)
    for group in groups:
      while not group.join(0.1) and not self.signum and time.monotonic() < end:
        pass
      if not group.join(0.0) and not self.signum:
        raise Failed(f'{self._spec.name}: group {group.index} does not end its step')

  def _hang_up(self) -> None:
    if self._connection is not None:
      self._connection.close()
    self._connection = None

  def _bye(self, reason: str) -> None:
    assert self._connection is not None
    self._connection.say_last(wire.pack(wire.BYE, self._session or 0, reason), 2000)

  def _leave(self) -> None:
    if self._connection is not None and self._session is not None and not self.over:
      why = signal.Signals(self.signum).name if self.signum else 'it failed'
      self._bye(why)
    self._hang_up()
    for group in self._groups:
      group.stop()
    end = time.monotonic() + END_SECONDS
    for group in self._groups:
      group.join(max(end - time.monotonic(), 0.0))
    self._context.term()


def cores() -> int:
  """How many this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def group_sizes(num_envs: int, groups: int, largest: int) -> list[int]:
  """Sizes of groups, as equal as can be; each at most `largest`.

  Raises:
    ValueError: if so few groups are asked for that they would be larger.
  """
  least = -(-num_envs // largest)
  if groups and groups < least:
    raise ValueError(
      f'--groups {groups}: an actor thread of the learner takes groups of at most {largest} '
      f'environments, which makes {least} of {num_envs}'
    )
  count = min(groups or max(2, least), num_envs, wire.GROUPS)
  if -(-num_envs // count) > largest:
    raise ValueError(
      f'--num-envs {num_envs}: a client has at most {wire.GROUPS} groups of {largest} environments'
    )
  return [num_envs // count + (i < num_envs % count) for i in range(count)]


def run(options: Options) -> int:
  """`podrace envs`: the exit code."""
  spec = make_spec(options.env)
  if spec.try_out is not None:
    spec.try_out(options.deadline)
  client = Client(options, spec)

  def on_signal(signum: int, frame: Any) -> None:
    client.signum = signum
    client._wake.set()

  try:
    with on_signals(on_signal):
      client.run()
  except Refused as e:
    log.error('%s', e)
    return 2
  except (Failed, TimeoutError) as e:
    log.error('%s', e)
    return 1
  return 128 + client.signum if client.signum else 0
