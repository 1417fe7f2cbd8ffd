"""The learner's end: clients with environments, and pools of them for the actor threads.

One thread at a time has the network, and it is one that waits for environments, if there is any: so that
between a message and its answer there is no other thread. Where all are busy a thread of the server's own
looks after it now and then.

A client's environments come in groups that step together. A group takes slots, as many as it has
environments, in one actor thread's pool; to Sebulba a slot is an environment, and another group in it
is another life of that environment. Everything a client says is checked here: what is not as
docs/protocol.md has it ends the client's session, never the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import shlex
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.envs.host.base import START_SECONDS, HostSpec
from podrace.envs.spaces import tree
from podrace.group import everyones
from podrace.net.frame import Kind
from podrace.net.lines import Say
from podrace.net.listener import Handler, Listen, Listener, Peer
from podrace.net.measures import LOGGED, logged, resident_mb
from podrace.net.session import GUEST_BYTES
from podrace.net.text import STRING, plain
from podrace.remote import wire
from podrace.remote.groups import STEPPING, Client, Group, Item, within_episodes
from podrace.remote.pool import RemotePool
from podrace.remote.wire import WireError
from podrace.types import Arrival, TimeStep

ENVIRONMENTS = 65536  # of one client, at most
WAITING = 16384  # groups without slots, of all clients
GOODBYE = 1.0  # seconds that clients have to answer that the run has ended
CARE = 0.05  # seconds between looks at the network while all actor threads are busy
REMIND = 60.0  # seconds between messages that there are no environments
TOGETHER = 2**21  # bytes of timesteps that are looked at together, unless a single one has more

log = logging.getLogger('podrace.remote')


class Server(Handler):
  """Listens while it is entered. `spec` makes a kind of environment one whose pools are remote.

  Args:
    slots: environments of all pools.
    max_wait: seconds that those that are there wait for more.
    deadline: seconds that environments may take for a step.
  """

  service, kinds = wire.SERVICE, wire.OF_CLIENTS

  def __init__(
    self,
    listen: Listen,
    slots: int,
    max_wait: float = 0.005,
    deadline: float = 60.0,
    say: Say = log.log,
  ) -> None:
    self.listener = Listener(listen, self, say)
    self.log, self.counts = self.listener.log, self.listener.counts
    self.peers = self.listener.peers
    self.max_wait, self._deadline = max_wait, deadline
    self.failure: str | None = None
    self._slots = slots
    self._pools: list[RemotePool] = []
    self._come: list[Item] = []  # not looked at yet
    self._come_bytes = 0
    self._waiting: list[Group] = []  # for slots
    self._assigning = False
    self._lonely_since: float | None = None
    self._reminded = 0.0
    self._lead = threading.Lock()  # held by the thread that has the network
    self._thread: threading.Thread | None = None
    self._stop = threading.Event()
    self._shut = self._finished = False

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

  @property
  def address(self) -> str:
    """Where it listens."""
    return self.listener.address

  @property
  def largest(self) -> int:
    """Bytes of a frame, at most; no group is larger than all slots."""
    return max(self.layout.step_bytes(self._slots) + 64, GUEST_BYTES)

  # --- its life ----------------------------------------------------------------------------------

  def __enter__(self) -> Server:
    self.listener.open()
    self._thread = threading.Thread(target=self._main, name='remote', daemon=True)
    self._thread.start()
    return self

  def finished(self) -> None:
    """The run is complete: clients hear it, and need not wait for another. Nobody is served any more."""
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
    self.listener.close()

  def call(self, do: Callable[..., None], *args: Any) -> None:
    """Does something at once, or has it done by the thread that has the network.

    Raises:
      RuntimeError: if one of them has failed.
    """
    self.listener.later(functools.partial(do, *args))
    if not self._as_leader(self.listener.do_calls):
      self.listener.wake()

  def turn(self, wait: float) -> bool:
    """Listens for up to `wait` seconds, and deals with what comes; False if another thread does.

    Raises:
      RuntimeError: if it failed, now or before.
    """
    return self._as_leader(self.listener.turn, wait)

  def wake(self) -> None:
    """Has the thread that has the network look around."""
    self.listener.wake()

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

  def _main(self) -> None:
    """Looks after the network while nobody else does, and takes leave at the end."""
    while not self._stop.wait(CARE):
      with contextlib.suppress(RuntimeError):  # which is said already, and to the actor threads
        self.turn(0.0)
      self.pass_on()  # who found the network taken waits to be given it
    self.wake()
    with self._lead:
      if self.failure is None:
        why = 'the run is complete' if self._finished else 'the learner has stopped'
        self.listener.end(self._finished, why, GOODBYE)

  # --- as a listener's handler: sessions ---------------------------------------------------------

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    env = details.get('env')
    if type(env) is not str or len(env) > STRING:
      raise WireError(f'a hello without an env that is a string of at most {STRING} characters')
    return wire.differences(self.schema, details.get('schema'))

  def why_wait(self, details: dict[str, Any]) -> str:
    return '' if self._pools else 'the learner is getting ready'

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    peer.state = Client(details)
    if details['env'] == self.env[:STRING]:
      self.log(f'{peer.name} joins with {peer.state.env}')
    else:
      self.log(
        f'{peer.name} joins with {plain(details["env"])}, this run is of {self.env}: their arrays are alike, '
        'so they take part; end them if that is not what you want',
        logging.WARNING,
      )
    return dict(largest_group=self._largest_group, env=self.env[:STRING])

  @property
  def _largest_group(self) -> int:
    return min((p.batch_size for p in self._pools), default=0)

  def left(self, peer: Peer, reason: str, level: int) -> None:
    """Unrolls that its environments had begun are dropped with it."""
    self.turned()  # first what was said first
    self._waiting = [g for g in self._waiting if g.peer is not peer]
    for group in peer.state.groups.values():
      state, group.state = group.state, 'gone'
      if group.pool is None:
        continue
      if state in ('asked', 'come'):
        group.pool.expect(-group.size)
        self._release(group)
      elif group.pool.withdraw(group):
        self._release(group)  # else when it is answered

  # --- what clients say --------------------------------------------------------------------------

  def memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Where a STEP comes: in its group's own memory."""
    group = self._stepping(peer, *fields)
    if group is None:
      return None
    if size != self.layout.step_bytes(group.size):
      raise WireError(
        f'a STEP of {size} bytes, expected {self.layout.step_bytes(group.size)} of {group.size} environments'
      )
    return group.buffer(size)

  def _stepping(self, peer: Peer, index: int, seq: int) -> Group | None:
    """The group that makes this step; None if its actor thread has ended."""
    group = peer.state.groups.get(index)
    if group is not None and group.state == 'gone':
      return None
    if group is None or group.state != 'asked' or group.seq != seq:
      state = f'in turn {group.seq}, {group.state}' if group else 'which has not entered'
      raise WireError(f'timesteps {seq} of group {index}, {state}')
    return group

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    if kind is wire.STEP:
      group = self._stepping(peer, *fields)
      if group is not None:
        self._step(group, arrays[0])
    else:
      self._enter(peer, *fields)

  def _enter(self, peer: Peer, index: int, size: int) -> None:
    client: Client = peer.state
    if index >= wire.GROUPS or index in client.groups:
      raise WireError(f'group {index}, which is there already or more than {wire.GROUPS - 1}')
    if not 1 <= size <= self._largest_group or client.environments + size > ENVIRONMENTS:
      raise WireError(f'a group of {size} environments, expected 1 to {self._largest_group}')
    if len(self._waiting) >= WAITING:
      self.listener.tell_gone(peer, f'{WAITING} groups of environments wait already')
      return
    group = client.groups[index] = Group(peer, index, size)
    client.environments += size
    self._waiting.append(group)
    self._assign()
    if group.state == 'waiting' and not client.must_wait:
      client.must_wait = True
      slots = sum(p.num_envs for p in self._pools)
      self.log(
        f'{peer.name}: environments wait until others leave; all {slots} slots (--num-envs) are taken, '
        f'or no {size} of one actor thread are free'
      )

  def _step(self, group: Group, body: memoryview) -> None:
    now = time.monotonic()
    if group.seq:
      group.client.stepping.add(now - group.since)
    group.state, group.since = 'come', now
    if self._come_bytes + len(body) > TOGETHER:
      self.turned()
    self._come.append(Item(group, self.layout.arrays(body, group.size), now))
    self._come_bytes += len(body)

  def turned(self) -> None:
    """Deals with the timesteps that have come: together, as most of what there is to check costs as much for many."""
    items, self._come, self._come_bytes = self._come, [], 0
    if items:
      self._accept(items)

  def _accept(self, items: list[Item]) -> None:
    items = [item for item in items if item.group.state == 'come']  # else dropped since
    if not items:
      return
    steps = [item.arrays for item in items]
    try:
      records = self.layout.records(steps)
      if not np.isfinite(records.numbers).all():
        raise WireError('a reward, score or discount that is NaN or infinite')
      self.layout.check_observations(steps)
      within = within_episodes(items, records)
    except Exception as e:
      if len(items) == 1:
        self.listener.blame(items[0].group.peer, e)
        return
      if not isinstance(e, WireError):
        self.listener.unexpected(e)
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
      self.listener.blame(group.peer, e)
      return
    if restarts is not None and group.pool is not None:
      group.pool.run_id[group.slots] += restarts
      group.run_id = group.pool.run_id[group.slots]
      group.client.restarts += int(restarts.sum())

  def _pass_on(self, items: list[Item]) -> None:
    """To the actor threads."""
    pools: dict[RemotePool, list[Item]] = {}
    for item in items:
      group = item.group
      group.state = 'thinking'
      group.client.frames += group.size
      self.counts['frames'] += group.size
      assert group.pool is not None
      pools.setdefault(group.pool, []).append(item)
    for pool, those in pools.items():
      pool.put(those)

  # --- what actor threads want -------------------------------------------------------------------

  def pool(self, pool: RemotePool) -> None:
    """One more that takes environments."""
    self._pools.append(pool)
    self._reminded = 0.0
    self._assign()

  def unpool(self, pool: RemotePool) -> None:
    """One that takes none any more."""
    if pool in self._pools:
      self._pools.remove(pool)
    for group in self._groups():  # whose clients keep their sessions, to hear how the run ends
      if group.pool is pool:
        group.state, group.pool = 'gone', None

  def _groups(self) -> list[Group]:
    return [group for peer in self.peers for group in peer.state.groups.values()]

  def answer(self, pool: RemotePool, items: list[Item], actions: bytes) -> None:
    """Sends these actions of all their environments, one after the other."""
    start = asked = 0
    for item in items:
      group = item.group
      data = actions[start : (start := start + group.size * self.layout.action_bytes)]
      if group.state == 'gone':  # while the answer was made
        self._release(group)
        continue
      now, seq = time.monotonic(), group.seq
      group.state, group.since = 'asked', now
      group.seq += 1
      asked += group.size
      group.client.answering.add(now - item.at)
      self.listener.send(group.peer, wire.ACTION, group.index, seq, arrays=(data,))
    pool.expect(asked)

  # --- slots

  def _assign(self) -> None:
    """Gives slots to the groups that wait, where there are enough."""
    if self._assigning:  # a client is gone that was to hear of it; its slots are seen to below
      return
    self._assigning = True
    try:
      while groups := self._give_slots():
        for group in groups:
          if (
            group.state == 'asked'
          ):  # else its client has been dropped, as one that does not read is
            self.listener.send(group.peer, wire.START, group.index)
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

  # --- time --------------------------------------------------------------------------------------

  def forgive(self, seconds: float) -> None:
    for group in self._groups():
      group.since = min(group.since + seconds, time.monotonic())

  def tick(self, now: float) -> None:
    for peer in list(self.peers):
      for group in peer.state.groups.values():
        # A worker that hangs is replaced in the second part, unless the client gives up by itself.
        if group.state == 'asked' and now - group.since > self._deadline + START_SECONDS:
          why = f'group {group.index} has not answered for {now - group.since:.0f} s'
          self.listener.tell_gone(peer, why)
          break
    self._tell_of_loneliness(now)

  def _tell_of_loneliness(self, now: float) -> None:
    """That there are no environments, when it begins and every minute; and when it ends."""
    if not self._pools:
      return
    if any(group.state in STEPPING for group in self._groups()):
      if self._lonely_since is not None:
        self.log('environments are here, going on', always=True)
      self._lonely_since = None
      return
    if self._lonely_since is None:
      self._lonely_since, self._reminded = now, 0.0
    if now - self._reminded > REMIND:
      self._reminded = now
      keys = ' --keys DIR' if self.listener.listen.keys else ''
      self.log(
        'no environments are connected; waiting for '
        f'`podrace envs --connect {self.listener.reachable} --env {shlex.quote(self.env)}{keys}`',
        logging.WARNING, always=True,
      )  # fmt: skip

  # --- what there is to tell ---------------------------------------------------------------------

  def report(self) -> dict[str, Any]:
    """What `podrace top` shows; of the network thread."""
    return dict(
      self.listener.report(_described),
      env=self.env,
      slots=sum(p.num_envs for p in self._pools),
      free=sum(len(p.free) for p in self._pools),
    )

  def metrics(self) -> dict[str, float]:
    """Numbers for metrics.jsonl, of all learner processes, which must all ask; from another thread."""
    counts = {
      'remote_clients': len(self.peers),
      'remote_envs': sum(p.num_envs - len(p.free) for p in list(self._pools)),
      'remote_dropped': self.counts['dropped'],
      'remote_malformed': self.counts['malformed'],
      'remote_refused': self.counts['refused'] + self.counts['turned away'],
    }
    own = logged('remote', [peer.metrics for peer in list(self.peers)])
    every = everyones([*counts.values(), *(own.get(f'remote_{k}', math.nan) for k in LOGGED)])
    sums = every[:, : len(counts)].sum(0).astype(int).tolist()
    of_processes = [
      {name: x for name, x in zip(LOGGED, row, strict=True) if not math.isnan(x)}
      for row in every[:, len(counts) :].tolist()
    ]
    return {
      **dict(zip(counts, sums, strict=True)),
      'learner_resident_mb': resident_mb(),
      **logged('remote', of_processes),
    }


def _described(peer: Peer) -> dict[str, Any]:
  """What a report has of a client besides."""
  client: Client = peer.state
  return {
    'env': client.env,
    'environments': client.environments,
    'acting': sum(g.size for g in client.groups.values() if g.state in STEPPING),
    'frames': client.frames,
    'answer_ms': list(client.answering.milliseconds()),
    'step_ms': list(client.stepping.milliseconds()),
    'restarts': client.restarts,
  }
