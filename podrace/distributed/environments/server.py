"""The learner's server of remote environments.

A client's environments come in groups that step together. A group takes slots, one for each
environment, in the pool of one actor thread. To Sebulba a slot is an environment, and the next
group in it is another life of that environment. Every message of a client is checked: one that
differs from docs/protocol.md ends the client's session, never the run.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.environment_messages import NUMBERS, Layout, WireError
from podrace.distributed.environments.groups import WITH_SLOTS, ClientState, EnvironmentGroup
from podrace.distributed.environments.incoming import GroupStep, IncomingSteps
from podrace.distributed.environments.pool import Arrivals, RemotePool
from podrace.distributed.environments.shared_listener import SharedNetwork
from podrace.distributed.environments.slots import WAITING, Slots
from podrace.distributed.net.connections import Peer
from podrace.distributed.net.frame import Kind
from podrace.distributed.net.listener import Listen, Listener
from podrace.distributed.net.process_metrics import LOGGED, logged, resident_mb
from podrace.distributed.net.safe_text import STRING, Say, plain
from podrace.distributed.net.session_messages import GUEST_BYTES
from podrace.distributed.net.sessions import ServiceHandler
from podrace.envs.host.answer_timer import START_SECONDS
from podrace.envs.host.base import HostSpec
from podrace.topology import everyones

ENVIRONMENTS = 65536  # of one client, at most
REMIND_SECONDS = 60.0  # between messages that there are no environments

log = logging.getLogger('podrace.distributed.environments')


class Server(ServiceHandler):
  """Serves actions to remote environments.

  `spec` turns a kind of environment into one with remote pools.

  Owner: the run, with a `with` statement.
  Ends when: it is left, or an exception ends the network (`failure`).

  Args:
    slots: number of environments of all pools.
    max_wait: seconds to wait for more environments before acting on the ones that have answered.
    deadline: seconds that environments may take for a step.
    on_cores: whether the cores of this machine compute the actions, not an accelerator.
    say: receives the level and the text of each line to log.
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
    self._max_wait, self._deadline = max_wait, deadline
    self._limit, self._on_cores = slots, on_cores
    self.slots = Slots(slots, self._start, self.groups)
    self.network = SharedNetwork(listener, self.slots.pools)
    self.call = self.network.call
    self._loneliness = LonelinessLog(self.log)
    self._closed = False

  def spec(self, spec: HostSpec) -> HostSpec:
    """Return the same kind of environment with remote pools."""
    self.schema = environment_messages.schema(spec.observation_space, spec.action_space)
    self.layout = Layout(self.schema)
    self.env = spec.name
    self.incoming = IncomingSteps(self.layout, self.listener)
    arrivals = Arrivals(self.layout, spec.observation_space)
    return dataclasses.replace(
      spec,
      name=f'remote {spec.name}',
      make=functools.partial(
        RemotePool, self.network, self.slots, arrivals, self._max_wait, self._answer
      ),
      ordered_only=False,
      jax=None,
      comes_and_goes=True,
      metrics=self.metrics,
      finished=self.network.finish,
      try_out=None,
    )

  @property
  def address(self) -> str:
    """Address that it listens at."""
    return self.listener.address

  @property
  def largest(self) -> int:
    """Bytes of a frame, at most. No group is larger than all slots."""
    return max(self._limit * self.layout.environment_bytes + 64, GUEST_BYTES)

  # --- life cycle -------------------------------------------------------------------------------

  def __enter__(self) -> Server:
    self.network.open()
    return self

  def __exit__(self, *exc: object) -> None:
    if not self._closed:
      self._closed = True
      self.network.close()

  @property
  def failure(self) -> str | None:
    """Traceback of the exception that ended the network, or None."""
    return self.network.failure

  # --- sessions ---------------------------------------------------------------------------------

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    """Return the arrays on which the two sides disagree."""
    env = details.get('env')
    if type(env) is not str or len(env) > STRING:
      raise WireError(f'a hello without an env that is a string of at most {STRING} characters')
    return environment_messages.differences(self.schema, details.get('schema'))

  def why_wait(self, details: dict[str, Any]) -> str:
    """Make clients wait until an actor thread takes environments."""
    return '' if self.slots.pools else 'the learner is getting ready'

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    """Begin a session, with advice on the number of groups."""
    peer.state = ClientState(details)
    if details['env'] == self.env[:STRING]:
      self.log(f'{peer.name} joins with {peer.state.env}')
    else:
      self.log(
        f'{peer.name} joins with {plain(details["env"])}, this run is of {self.env}: their arrays '
        'are alike, so they take part; end them if that is not what you want',
        logging.WARNING,
      )
    # Of two groups one steps while the learner acts for the other. If the same cores do both, the
    # groups wait for each other, and two half batches take longer than a whole one.
    groups = 1 if self._on_cores and peer.is_local else 2
    return dict(largest_group=self.slots.largest_group, groups=groups, env=self.env[:STRING])

  def left(self, peer: Peer, reason: str, level: int) -> None:
    """Release the client's groups, after its last timesteps."""
    self.turned()
    self.slots.leave(peer.state.groups.values())
    peer.state.groups.clear()  # they hold the peer: without this cycle its memory is freed at once

  # --- messages ---------------------------------------------------------------------------------

  def memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Return the group's memory for a STEP."""
    group = self._stepping(peer, *fields)
    if group is None:
      return None
    if size != (expected := group.size * self.layout.environment_bytes):
      raise WireError(f'a STEP of {size} bytes, expected {expected} of {group.size} environments')
    return group.buffer(size)

  def _stepping(self, peer: Peer, index: int, seq: int) -> EnvironmentGroup | None:
    """Return the group that makes this step, or None if its actor thread has ended."""
    group = peer.state.groups.get(index)
    if group is not None and group.state == 'gone':
      return None
    if group is None or group.state != 'stepping' or group.seq % NUMBERS != seq:
      state = f'in turn {group.seq}, {group.state}' if group else 'which has not entered'
      raise WireError(f'timesteps {seq} of group {index}, {state}')
    return group

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Handle a STEP or an ENTER."""
    if kind is environment_messages.STEP:
      group = self._stepping(peer, *fields)
      if group is not None:
        self.incoming.add(group, arrays[0])
    else:
      self._enter(peer, *fields)

  def _enter(self, peer: Peer, index: int, size: int) -> None:
    client: ClientState = peer.state
    largest = self.slots.largest_group
    if index >= environment_messages.GROUPS or index in client.groups:
      limit = environment_messages.GROUPS - 1
      raise WireError(f'group {index}, which is there already or more than {limit}')
    if not 1 <= size <= largest or client.environments + size > ENVIRONMENTS:
      raise WireError(f'a group of {size} environments, expected 1 to {largest}')
    if self.slots.is_crowded:
      self.listener.tell_gone(peer, f'{WAITING} groups of environments wait already')
      return
    group = client.groups[index] = EnvironmentGroup(peer, index, size)
    client.environments += size
    self.slots.enter(group)
    if group.state == 'waiting' and not client.must_wait:
      client.must_wait = True
      self.log(
        f'{peer.name}: environments wait until others leave; all {self.slots.total} slots '
        f'(--num-envs) are taken, or no {size} of one actor thread are free'
      )

  def turned(self) -> None:
    """Check the timesteps that came in this turn."""
    self.incoming.check()

  # --- for the pools ----------------------------------------------------------------------------

  def _start(self, group: EnvironmentGroup) -> None:
    self.listener.send(group.peer, environment_messages.START, group.index)

  def groups(self) -> list[EnvironmentGroup]:
    """Return the groups of all clients."""
    return [group for peer in self.peers for group in peer.state.groups.values()]

  def _answer(self, pool: RemotePool, items: list[GroupStep], actions: bytes) -> None:
    """Send each group its part of the actions of all their environments."""
    start = answered = 0
    for item in items:
      group = item.group
      data = actions[start : (start := start + group.size * self.layout.action_bytes)]
      if group.state == 'gone':  # since its timesteps were taken
        self.slots.release(group)
        continue
      now, seq = time.monotonic(), group.seq % NUMBERS
      group.state, group.since = 'stepping', now
      group.seq += 1
      answered += group.size
      group.client.answering.add(now - item.at)
      self.listener.send(group.peer, environment_messages.ACTION, group.index, seq, arrays=(data,))
    pool.expect(answered)

  # --- time --------------------------------------------------------------------------------------

  def forgive(self, seconds: float) -> None:
    """Extend the deadlines of steps."""
    for group in self.groups():
      group.since = min(group.since + seconds, time.monotonic())

  def tick(self, now: float) -> None:
    """End sessions with hanging environments, and log that there are no environments."""
    for group in self.groups():
      # The client needs START_SECONDS after the deadline to replace a worker that hangs.
      if group.state == 'stepping' and now - group.since > self._deadline + START_SECONDS:
        why = f'group {group.index} has not answered for {now - group.since:.0f} s'
        self.listener.tell_gone(group.peer, why)
    if self.slots.pools:
      any_here = any(group.state in WITH_SLOTS for group in self.groups())
      self._loneliness.update(now, any_here, self._command)

  def _command(self) -> str:
    keys = ' --keys DIR' if self.listener.listen.keys else ''
    address, env = map(shlex.quote, (self.listener.reachable, self.env))
    return f'podrace envs --connect {address} --env {env}{keys}'

  # --- reports ----------------------------------------------------------------------------------

  def report(self) -> dict[str, Any]:
    """Return the report for `podrace top`, in the thread that serves the network."""
    report = self.listener.report(_describe_client)
    return dict(report, env=self.env, slots=self.slots.total, free=self.slots.free)

  def metrics(self) -> dict[str, float]:
    """Return numbers for metrics.jsonl. A collective call: every learner process must make it."""
    counts = {
      'remote_clients': len(self.peers),
      'remote_envs': self.slots.total - self.slots.free,
      'remote_dropped': self.counts['dropped'],
      'remote_malformed': self.counts['malformed'],
      'remote_refused': self.counts['refused'] + self.counts['turned away'],
    }
    return _sum_over_processes(
      counts, logged('remote', [peer.metrics for peer in list(self.peers)])
    )


class LonelinessLog:
  """Logs that there are no environments, at first and every REMIND_SECONDS, and the end of that.

  Args:
    log: of the listener.
  """

  def __init__(self, log: Callable[..., None]) -> None:
    self._log = log
    self._logged_at: float | None = None  # None while there are environments

  def update(self, now: float, any_here: bool, command: Callable[[], str]) -> None:
    """Log a change; `command` returns the command that starts environments."""
    if any_here:
      if self._logged_at is not None:
        self._log('environments are here, going on', always=True)
      self._logged_at = None
    elif self._logged_at is None or now - self._logged_at > REMIND_SECONDS:
      self._logged_at = now
      text = f'no environments are connected; waiting for `{command()}`'
      self._log(text, logging.WARNING, always=True)


def _sum_over_processes(counts: dict[str, int], measures: dict[str, float]) -> dict[str, float]:
  """Sum counts over all learner processes, and aggregate the LOGGED measures of their clients."""
  rows = everyones([*counts.values(), *(measures.get(f'remote_{k}', math.nan) for k in LOGGED)])
  sums = rows[:, : len(counts)].sum(0).astype(int).tolist()
  of_processes = [
    {name: x for name, x in zip(LOGGED, row, strict=True) if not math.isnan(x)}
    for row in rows[:, len(counts) :].tolist()
  ]
  return {
    **dict(zip(counts, sums, strict=True)),
    'learner_resident_mb': resident_mb(),
    **logged('remote', of_processes),
  }


def _describe_client(peer: Peer) -> dict[str, Any]:
  """Return the entries of a report for a client."""
  client: ClientState = peer.state
  return {
    'env': client.env,
    'environments': client.environments,
    'acting': sum(g.size for g in client.groups.values() if g.state in WITH_SLOTS),
    'frames': client.frames,
    'answer_ms': list(client.answering.milliseconds()),
    'step_ms': list(client.stepping.milliseconds()),
    'restarts': client.restarts,
  }
