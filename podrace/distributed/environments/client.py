"""The environments' end: `podrace envs`. Imports no JAX.

Environments are stepped in groups, each by a thread of its own, so that some step while the learner
infers for others. A link has the network, says that it is alive, and comes back after whatever happens to the
connection or the learner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace import errors
from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.environment_messages import WireError
from podrace.distributed.net.address import check_address
from podrace.distributed.net.frame import Kind, flat
from podrace.distributed.net.link import Handler, Link, Refused
from podrace.distributed.net.process_metrics import Measures, Meter, resident_mb
from podrace.distributed.net.safe_text import STRING, plain
from podrace.envs.host import answer_timer
from podrace.envs.host import base as host
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.spaces import values
from podrace.system.process import on_signals
from podrace.system.scheduling import cores
from podrace.system.threads import Worker
from podrace.types import Arrival

TURN = 0.2  # seconds between looks at whether environments hang
END_SECONDS = 10.0  # that threads have to end their pools

log = logging.getLogger('podrace.distributed.environments')


class Failed(Exception):
  """An environment failed, or hangs."""


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `podrace envs`."""

  connect: str  # one address, or those of all learner processes with commas
  env: str
  num_envs: int = 1
  workers: int = 0  # threads or processes that step; 0: two a core, of a group at most one a core
  groups: int = 0  # 0: as many as the learner does best with
  seed: int | None = None
  keys: Path | None = None
  insecure: bool = False
  deadline: float = 60.0  # seconds that environments may take for a step
  give_up: float = 0.0  # seconds without a learner after which to end; 0: never

  def __post_init__(self) -> None:
    for address in self.addresses:
      check_address(address, self.keys, self.insecure, '--connect')
    for name, least in (('num_envs', 1), ('workers', 0), ('groups', 0)):
      if getattr(self, name) < least:
        flag = name.replace('_', '-')
        raise ValueError(f'--{flag} must be at least {least}, not {getattr(self, name)}')
    if not (0 < self.deadline < math.inf and 0 <= self.give_up < math.inf):
      raise ValueError(
        f'--env-deadline must be more than 0, not {self.deadline}, and --give-up-after not negative, '
        f'not {self.give_up}'
      )
    if self.num_envs < len(self.addresses):
      raise ValueError(
        f'--num-envs {self.num_envs}: each of the {len(self.addresses)} learner processes of --connect needs at '
        'least one'
      )

  @property
  def addresses(self) -> list[str]:
    """Of each learner process."""
    return self.connect.split(',')

  def parts(self) -> list[Options]:
    """For each learner process, with its share of the environments and workers."""
    n = len(self.addresses)
    if n == 1:
      return [self]
    workers = max(1, (self.workers or 2 * cores()) // n)
    return [
      dataclasses.replace(
        self,
        connect=address,
        num_envs=self.num_envs // n + (i < self.num_envs % n),
        workers=workers,
        seed=None if self.seed is None else self.seed + (i << 32),
      )
      for i, address in enumerate(self.addresses)
    ]


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


class Group:
  """Environments that step together, in a thread of their own, for one session.

  Args:
    say: sends the bytes of records and observations.
    ended: is called at the end of its thread, which may have failed.

  Attributes:
    worker: the thread, once it has begun.
  """

  def __init__(
    self,
    index: int,
    session: int,
    spec: HostSpec,
    args: PoolArgs,
    say: Callable[[Group, list[Any]], None],
    ended: Callable[[], None],
  ) -> None:
    self.index, self.session, self.size = index, session, args.num_envs
    self._spec, self._args, self._say, self._ended = spec, args, say, ended
    self.seq = 0  # of the timesteps that are said next, or were last
    self.busy_since: float | None = None
    self.watches_itself = False
    self._actions: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
    self.worker: Worker | None = None

  def start(self) -> None:
    self.busy_since = time.monotonic() + 60.0  # to make them takes its time
    self.worker = Worker(f'group-{self.index}', self._main, self._ended)

  def act(self, action: np.ndarray) -> None:
    self.busy_since = time.monotonic()
    self._actions.put(action)

  def stop(self) -> None:
    self._actions.put(None)

  def join(self, seconds: float) -> bool:
    """Whether the thread has ended."""
    return self.worker is None or self.worker.wait(seconds)

  def _main(self) -> None:
    with contextlib.closing(self._spec.make(self._args)) as pool:
      self.watches_itself = pool.watches_itself
      ids = np.arange(self.size, dtype=np.int32)
      pool.reset()
      self._send(pool.recv(), ids)
      while (action := self._actions.get()) is not None:
        pool.send(ids, action)
        self._send(pool.recv(), ids)

  def _send(self, arrival: Arrival, ids: np.ndarray) -> None:
    if not np.array_equal(arrival.env_id, ids):
      raise Failed(f'{self._spec.name} returned {arrival.env_id}, expected all in order')
    timestep = arrival.timestep
    records = np.zeros(self.size, environment_messages.RECORD)
    records['life'] = arrival.run_id
    records['reward'], records['discount'] = timestep.reward, timestep.discount
    records['score'], records['ended'] = arrival.score, arrival.ended
    records['step_type'] = timestep.step_type
    space = self._spec.observation_space
    self._say(self, [flat(x) for x in (records, *values(space, timestep.observation))])


# --- the network ------------------------------------------------------------------------------------


class Client(Handler):
  """Environments for one learner process. Its link's thread has the network; groups send by themselves.

  Args:
    clients: that this process has.
  """

  service, kinds = environment_messages.SERVICE, environment_messages.OF_LEARNERS

  def __init__(self, options: Options, spec: HostSpec, clients: int = 1) -> None:
    self._options, self._spec, self._clients = options, spec, clients
    self._env = spec.name[:STRING]
    self._schema = environment_messages.schema(spec.observation_space, spec.action_space)
    self._layout = environment_messages.Layout(self._schema)
    o = options
    self._link = Link(
      o.connect, o.keys, o.insecure, self, give_up=o.give_up, flag='--connect', what='learner'
    )
    self.start = self._link.start  # begins to connect
    self._groups: list[Group] = []
    self._meter = Meter()
    self._lives = 0
    self.signum = 0

  @property
  def done(self) -> bool:
    """Nothing more is to be done."""
    return self._link.closed or bool(self.signum)

  def stop(self, signum: int) -> None:
    """A signal came."""
    self.signum = signum
    self._link.wake()

  def look(self, seconds: float) -> None:
    """Waits for the end, for at most so long.

    Raises:
      Refused, Failed: see there.
      TimeoutError: if there was no learner for `give_up` seconds.
    """
    self._link.check()
    now = time.monotonic()
    for group in self._groups:
      if group.worker is not None and group.worker.failed:
        raise Failed(f'{self._spec.name} failed:\n{group.worker.message(errors.HostError)}')
      since = group.busy_since
      if since is not None and not group.watches_itself and now - since > self._options.deadline:
        raise Failed(f'{self._spec.name}: no answer for {now - since:.0f} s')
    with self._link.changed:
      if not self.done:
        self._link.changed.wait(seconds)

  def close(self, why: str) -> None:
    """Ends the session, and the environments; raises as `look`."""
    self._link.close(why)
    self._end_groups(END_SECONDS)
    self._link.check()

  # --- what groups say, in their threads

  def _say(self, group: Group, arrays: list[Any]) -> None:
    group.busy_since = None
    self._meter.add(steps_per_s=group.size)
    self._link.send(
      environment_messages.STEP, group.index, group.seq, arrays=arrays, within=group.session
    )

  def _group_ended(self) -> None:
    with self._link.changed:
      self._link.changed.notify_all()

  # --- as a link's handler

  def hello(self) -> dict[str, Any]:
    return {'env': self._env, 'schema': self._schema}

  def joined(self, details: dict[str, Any]) -> None:
    """Begins a session, with environments made anew when they get slots."""
    largest, env = details.get('largest_group'), details.get('env')
    groups = details.get('groups', 2)  # other learners may not say
    if type(largest) is not int or largest < 1 or type(env) is not str:
      raise WireError(f'a welcome with groups of {largest!r} environments of {str(env)[:60]!r}')
    if type(groups) is not int or groups < 1:
      raise WireError(f'a welcome with {groups!r} groups')
    o, session = self._options, self._link.number
    sizes = group_sizes(o.num_envs, o.groups, largest, groups)
    seeds = np.random.SeedSequence(None if o.seed is None else [o.seed, self._lives])
    self._lives += 1
    # While the learner acts for one group the other has the cores: two groups have them all, each.
    workers = o.workers // len(sizes) if o.workers else min(cores(), 2 * cores() // len(sizes))
    self._groups = []
    for i, (size, seed) in enumerate(zip(sizes, seeds.spawn(len(sizes)), strict=True)):
      args = PoolArgs(size, size, seed.generate_state(size, np.uint32), max(1, workers), o.deadline)
      self._groups.append(Group(i, session, self._spec, args, self._say, self._group_ended))
    log.info(
      'joined the learner of %s with %d environments in %s',
      plain(env), o.num_envs, 'one group' if len(sizes) == 1 else f'{len(sizes)} groups',
    )  # fmt: skip
    if env != self._env:
      log.warning(
        'these environments are %s, the learner is one of %s: their arrays are alike, so they take part; '
        'give --env %s if that is not what you want', self._env, *[plain(env)] * 2,
      )  # fmt: skip
    for group in self._groups:
      self._link.send(environment_messages.ENTER, group.index, group.size)

  def metrics(self) -> Measures:
    return {**self._meter.read(), 'resident_mb': resident_mb() / self._clients}

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    index = fields[0]
    group = self._groups[index] if index < len(self._groups) else None
    if kind is environment_messages.START:
      if group is None or group.worker is not None:
        raise WireError(f'a start of group {index}, which there is not or has begun')
      group.start()
    elif group is None or group.seq != fields[1] or group.busy_since is not None:
      raise WireError(f'actions {fields[1]} for group {index}, which has not asked for them')
    else:
      actions = self._layout.actions(arrays[0], group.size)
      group.seq += 1
      group.act(actions)

  def lost(self, reason: str) -> None:
    if self._groups and not self._link.closed:
      log.warning('environments begin anew when it is back')
    self._end_groups(self._options.deadline)

  def ended(self, complete: bool, reason: str) -> bool:
    if complete:
      log.info('%s', reason)
    return complete

  def _end_groups(self, seconds: float) -> None:
    groups, self._groups = self._groups, []
    for group in groups:
      group.stop()
    # Those that watch themselves may have just begun to replace one that hangs.
    allowed = seconds + answer_timer.START_SECONDS * any(g.watches_itself for g in groups)
    end = time.monotonic() + allowed
    for group in groups:
      while not group.join(0.1) and not self.signum and time.monotonic() < end:
        pass
      if not group.join(0.0) and not self.signum:
        raise Failed(f'{self._spec.name}: group {group.index} does not end its step')


def group_sizes(num_envs: int, groups: int, largest: int, best: int) -> list[int]:
  """Sizes of groups, as equal as can be; each at most `largest`.

  Args:
    groups: how many there are to be; 0: `best`, or as many as there must be.

  Raises:
    ValueError: if so few groups are asked for that they would be larger.
  """
  least = -(-num_envs // largest)
  if groups and groups < least:
    raise ValueError(
      f'--groups {groups}: an actor thread of the learner takes groups of at most {largest} '
      f'environments, which makes {least} of {num_envs}'
    )
  count = min(groups or max(best, least), num_envs, environment_messages.GROUPS)
  if -(-num_envs // count) > largest:
    raise ValueError(
      f'--num-envs {num_envs}: a client has at most {environment_messages.GROUPS} groups of {largest} environments'
    )
  return [num_envs // count + (i < num_envs % count) for i in range(count)]


def run_all(clients: Sequence[Client]) -> None:
  """Until the run is complete, or one of them can't go on; raises as `Client.look`."""
  why = 'it failed'
  try:
    for client in clients:
      client.start()
    while not any(client.done for client in clients):
      for client in clients:
        client.look(TURN / len(clients))
    signum = clients[0].signum
    why = signal.Signals(signum).name if signum else 'the run is complete'
  finally:
    with contextlib.ExitStack() as stack:
      for client in clients:
        stack.callback(client.close, why)


def run(options: Options) -> int:
  """`podrace envs`: the exit code."""
  spec = make_spec(options.env)
  if spec.try_out is not None:
    spec.try_out(options.deadline)
  parts = options.parts()
  clients = [Client(part, spec, len(parts)) for part in parts]

  def on_signal(signum: int, frame: Any) -> None:
    for client in clients:
      client.stop(signum)

  try:
    with on_signals(on_signal):
      run_all(clients)
  except Refused as e:
    log.error('%s', e)
    return 2
  except (Failed, TimeoutError) as e:
    log.error('%s', e)
    return 1
  return 128 + clients[0].signum if clients[0].signum else 0
