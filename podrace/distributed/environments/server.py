"""The learner's end: clients with environments, and pools of them for the actor threads.

A client's environments come in groups that step together. A group takes slots, as many as it has
environments, in one actor thread's pool; to Sebulba a slot is an environment, and another group in it
is another life of that environment. Everything a client says is checked here: what is not as
docs/protocol.md has it ends the client's session, never the run.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import shlex
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.environment_messages import WireError
from podrace.distributed.environments.groups import STEPPING, Client, Group, Incoming, Item
from podrace.distributed.environments.pool import RemotePool
from podrace.distributed.environments.shared_listener import SharedNetwork
from podrace.distributed.environments.slots import WAITING, Slots
from podrace.distributed.net.connections import Peer
from podrace.distributed.net.frame import Kind
from podrace.distributed.net.listener import Listen, Listener
from podrace.distributed.net.process_metrics import LOGGED, logged, resident_mb
from podrace.distributed.net.safe_text import STRING, Say, plain
from podrace.distributed.net.session_messages import GUEST_BYTES
from podrace.distributed.net.sessions import Handler
from podrace.envs.host.answer_timer import START_SECONDS
from podrace.envs.host.base import HostSpec
from podrace.envs.spaces import tree
from podrace.topology import everyones
from podrace.types import Arrival, TimeStep

ENVIRONMENTS = 65536  # of one client, at most
REMIND = 60.0  # seconds between messages that there are no environments

log = logging.getLogger('podrace.distributed.environments')


class Server(Handler):
  """Listens while it is entered. `spec` makes a kind of environment one whose pools are remote.

  Args:
    slots: environments of all pools.
    max_wait: seconds that those that are there wait for more.
    deadline: seconds that environments may take for a step.
    on_cores: this machine's cores compute the actions, not an accelerator.
  """

  service, kinds = environment_messages.SERVICE, environment_messages.OF_CLIENTS

  def __init__(
    self,
    listen: Listen,
    slots: int,
    max_wait: float = 0.005,
    deadline: float = 60.0,
    on_cores: bool = False,
    say: Say = log.log,
  ) -> None:
    self.listener = listener = Listener(listen, self, say)
    self.log, self.counts, self.peers = listener.log, listener.counts, listener.peers
    self.max_wait, self._deadline, self._most, self._on_cores = max_wait, deadline, slots, on_cores
    self.slots = Slots(
      slots, lambda group: listener.send(group.peer, environment_messages.START, group.index)
    )
    self.network = network = SharedNetwork(listener, self.slots.pools)
    self.call, self.turn, self.finished = network.call, network.turn, network.finish
    self.wake, self.pass_on = listener.wake, network.pass_on
    self._lonely_at: float | None = None  # when it was said last that there are no environments
    self._closed = False

  def spec(self, spec: HostSpec) -> HostSpec:
    """The same kind of environment, of which others have the pools."""
    self.observation_space = spec.observation_space
    self.schema = environment_messages.schema(spec.observation_space, spec.action_space)
    self.layout = environment_messages.Layout(self.schema)
    self.env = spec.name
    self._incoming = Incoming(self.layout, self.listener)
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
    return max(self._most * self.layout.environment_bytes + 64, GUEST_BYTES)

  # --- its life ----------------------------------------------------------------------------------

  def __enter__(self) -> Server:
    self.network.open()
    return self

  def __exit__(self, *exc: object) -> None:
    if not self._closed:
      self._closed = True
      self.network.close()

  @property
  def failure(self) -> str | None:
    """The traceback of what has ended the network; None if nothing has."""
    return self.network.failure

  # --- as a listener's handler: sessions ---------------------------------------------------------

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    env = details.get('env')
    if type(env) is not str or len(env) > STRING:
      raise WireError(f'a hello without an env that is a string of at most {STRING} characters')
    return environment_messages.differences(self.schema, details.get('schema'))

  def why_wait(self, details: dict[str, Any]) -> str:
    return '' if self.slots.pools else 'the learner is getting ready'

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
    # Of two groups one steps while the learner acts for the other. Where the same cores do both,
    # they wait for each other nevertheless, and two half batches take longer than a whole one.
    groups = 1 if self._on_cores and peer.here else 2
    return dict(largest_group=self.slots.largest_group, groups=groups, env=self.env[:STRING])

  def left(self, peer: Peer, reason: str, level: int) -> None:
    self.turned()  # first what was said first
    self.slots.leave(peer.state.groups.values())

  # --- what clients say --------------------------------------------------------------------------

  def memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Where a STEP comes: in its group's own memory."""
    group = self._stepping(peer, *fields)
    if group is None:
      return None
    if size != (expected := group.size * self.layout.environment_bytes):
      raise WireError(f'a STEP of {size} bytes, expected {expected} of {group.size} environments')
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
    if kind is environment_messages.STEP:
      group = self._stepping(peer, *fields)
      if group is not None:
        self._incoming.add(group, arrays[0])
    else:
      self._enter(peer, *fields)

  def _enter(self, peer: Peer, index: int, size: int) -> None:
    client: Client = peer.state
    largest = self.slots.largest_group
    if index >= environment_messages.GROUPS or index in client.groups:
      raise WireError(
        f'group {index}, which is there already or more than {environment_messages.GROUPS - 1}'
      )
    if not 1 <= size <= largest or client.environments + size > ENVIRONMENTS:
      raise WireError(f'a group of {size} environments, expected 1 to {largest}')
    if self.slots.crowded:
      self.listener.tell_gone(peer, f'{WAITING} groups of environments wait already')
      return
    group = client.groups[index] = Group(peer, index, size)
    client.environments += size
    self.slots.enter(group)
    if group.state == 'waiting' and not client.must_wait:
      client.must_wait = True
      self.log(
        f'{peer.name}: environments wait until others leave; all {self.slots.total} slots (--num-envs) are taken, '
        f'or no {size} of one actor thread are free'
      )

  def turned(self) -> None:
    self._incoming.look()

  # --- what actor threads want -------------------------------------------------------------------

  def unpool(self, pool: RemotePool) -> None:
    """One that takes none any more."""
    self.slots.remove(pool, self._groups())

  def _groups(self) -> list[Group]:
    return [group for peer in self.peers for group in peer.state.groups.values()]

  def answer(self, pool: RemotePool, items: list[Item], actions: bytes) -> None:
    """Sends these actions of all their environments, one after the other."""
    start = asked = 0
    for item in items:
      group = item.group
      data = actions[start : (start := start + group.size * self.layout.action_bytes)]
      if group.state == 'gone':  # while the answer was made
        self.slots.release(group)
        continue
      now, seq = time.monotonic(), group.seq
      group.state, group.since = 'asked', now
      group.seq += 1
      asked += group.size
      group.client.answering.add(now - item.at)
      self.listener.send(group.peer, environment_messages.ACTION, group.index, seq, arrays=(data,))
    pool.expect(asked)

  # --- time --------------------------------------------------------------------------------------

  def forgive(self, seconds: float) -> None:
    for group in self._groups():
      group.since = min(group.since + seconds, time.monotonic())

  def tick(self, now: float) -> None:
    for group in self._groups():
      # A worker that hangs is replaced in the second part, unless the client gives up by itself.
      if group.state == 'asked' and now - group.since > self._deadline + START_SECONDS:
        why = f'group {group.index} has not answered for {now - group.since:.0f} s'
        self.listener.tell_gone(group.peer, why)  # with all its groups
    self._tell_of_loneliness(now)

  def _tell_of_loneliness(self, now: float) -> None:
    """That there are no environments, when it begins and every minute; and when it ends."""
    if not self.slots.pools:
      return
    if any(group.state in STEPPING for group in self._groups()):
      if self._lonely_at is not None:
        self.log('environments are here, going on', always=True)
      self._lonely_at = None
    elif self._lonely_at is None or now - self._lonely_at > REMIND:
      self._lonely_at = now
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
      self.listener.report(_described), env=self.env, slots=self.slots.total, free=self.slots.free
    )

  def metrics(self) -> dict[str, float]:
    """Numbers for metrics.jsonl, of all learner processes, which must all ask; from another thread."""
    counts = {
      'remote_clients': len(self.peers),
      'remote_envs': self.slots.total - self.slots.free,
      'remote_dropped': self.counts['dropped'],
      'remote_malformed': self.counts['malformed'],
      'remote_refused': self.counts['refused'] + self.counts['turned away'],
    }
    return _of_all(counts, logged('remote', [peer.metrics for peer in list(self.peers)]))


def _of_all(counts: dict[str, int], own: dict[str, float]) -> dict[str, float]:
  """Sums of counts, and of clients' measures what is logged, over all learner processes."""
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
