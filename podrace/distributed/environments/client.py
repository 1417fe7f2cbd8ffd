"""The client of a learner's server: `podrace envs`. Imports no JAX.

Environments step in groups, each in its own thread, so that some groups step while the learner acts
for the rest. A link keeps the session alive, and connects again after any failure of the connection
or the learner.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from podrace import errors
from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.client_options import ClientOptions, group_sizes, make_spec
from podrace.distributed.environments.environment_messages import NUMBERS, WireError
from podrace.distributed.environments.group_thread import GroupFailed, GroupThread
from podrace.distributed.net.frame import Kind
from podrace.distributed.net.link import Link, LinkHandler, Refused
from podrace.distributed.net.process_metrics import Measures, Meter, resident_mb
from podrace.distributed.net.safe_text import STRING, plain
from podrace.envs.host import answer_timer
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.system.process import on_signals
from podrace.system.scheduling import cores

LOOK_SECONDS = 0.2  # between checks for environments that hang
END_SECONDS = 10.0  # that threads have to end their pools

log = logging.getLogger('podrace.distributed.environments')


class EnvironmentClient(LinkHandler):
  """Runs environments for one learner process.

  The link's thread receives messages. Each group has a thread, which sends its timesteps itself.

  Owner: `run_all`, which calls `start` and `close`.

  Args:
    options: of this learner process, see `ClientOptions.parts`.
    spec: the kind of environment.
    clients: number of clients in this process.
  """

  service, kinds = environment_messages.SERVICE, environment_messages.OF_LEARNERS

  def __init__(self, options: ClientOptions, spec: HostSpec, clients: int = 1) -> None:
    self._options, self._spec, self._clients = options, spec, clients
    self._env = spec.name[:STRING]
    self._schema = environment_messages.schema(spec.observation_space, spec.action_space)
    self._layout = environment_messages.Layout(self._schema)
    o = options
    self.link = Link(
      o.connect, o.keys, o.insecure, self, give_up=o.give_up, flag='--connect', what='learner'
    )
    self.start = self.link.start
    self.groups: list[GroupThread] = []
    self._meter, self._deadline = Meter(), answer_timer.AnswerDeadline(o.deadline)
    self._lives = 0
    self.signum = 0

  @property
  def done(self) -> bool:
    """Whether there is nothing more to do."""
    return self.link.closed or bool(self.signum)

  def stop(self, signum: int) -> None:
    """End because of a signal."""
    self.signum = signum
    self.link.wake()

  def look(self, seconds: float) -> None:
    """Check the groups, and wait up to `seconds` for the end.

    Raises:
      Refused: if the learner refuses the environments.
      GroupFailed: if an environment failed, or hangs.
      TimeoutError: if there was no learner for `give_up` seconds.
    """
    self.link.check()
    now = time.monotonic()
    for group in self.groups:
      if group.worker is not None and group.worker.failed:
        raise GroupFailed(
          f'{self._spec.name} failed:\n{group.worker.message(errors.HostError, errors.RunError)}'
        )
      since = group.busy_since
      silence = 0.0 if since is None or group.watches_itself else now - since
      if self._deadline.passed(group.index, silence):
        raise GroupFailed(f'{self._spec.name}: no answer for {silence:.0f} s')
    with self.link.changed:
      if not self.done:
        self.link.changed.wait(seconds)

  def close(self, why: str) -> None:
    """End the session and the environments. Raises as `look`."""
    self.link.close(why)
    self._end_groups(END_SECONDS)
    self.link.check()

  # --- in the threads of groups

  def _send_step(self, group: GroupThread, arrays: list[Any]) -> None:
    group.busy_since = None
    self._meter.add(steps_per_s=group.size)
    number, session = group.seq % NUMBERS, group.session
    self.link.send(environment_messages.STEP, group.index, number, arrays=arrays, within=session)

  def _group_ended(self) -> None:
    with self.link.changed:
      self.link.changed.notify_all()

  # --- in the link's thread

  def hello(self) -> dict[str, Any]:
    """Return the environment and its arrays."""
    return {'env': self._env, 'schema': self._schema}

  def joined(self, details: dict[str, Any]) -> None:
    """Begin a session. The environments are made anew when they get slots."""
    largest, env = details.get('largest_group'), details.get('env')
    groups = details.get('groups', 2)  # optional in the protocol
    if type(largest) is not int or largest < 1 or type(env) is not str:
      raise WireError(f'a welcome with groups of {largest!r} environments of {str(env)[:60]!r}')
    if type(groups) is not int or groups < 1:
      raise WireError(f'a welcome with {groups!r} groups')
    o, session = self._options, self.link.number
    sizes = group_sizes(o.num_envs, o.groups, largest, groups)
    seeds = np.random.SeedSequence(None if o.seed is None else [o.seed, self._lives])
    self._lives += 1
    # Each of two groups has all cores: the learner acts for one group while the other steps.
    workers = o.workers // len(sizes) if o.workers else min(cores(), 2 * cores() // len(sizes))
    self.groups = []
    for i, (size, seed) in enumerate(zip(sizes, seeds.spawn(len(sizes)), strict=True)):
      args = PoolArgs(size, size, seed.generate_state(size, np.uint32), max(1, workers), o.deadline)
      self.groups.append(
        GroupThread(i, session, self._spec, args, self._send_step, self._group_ended)
      )
    log.info(
      'joined the learner of %s with %d environments in %s',
      plain(env), o.num_envs, 'one group' if len(sizes) == 1 else f'{len(sizes)} groups',
    )  # fmt: skip
    if env != self._env:
      log.warning(
        'these environments are %s, the learner is one of %s: their arrays are alike, so they take '
        'part; give --env %s if that is not what you want', self._env, *[plain(env)] * 2,
      )  # fmt: skip
    for group in self.groups:
      self.link.send(environment_messages.ENTER, group.index, group.size)

  def metrics(self) -> Measures:
    """Return steps per second, and this client's share of the memory."""
    return {**self._meter.read(), 'resident_mb': resident_mb() / self._clients}

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Handle a START or an ACTION."""
    index = fields[0]
    group = self.groups[index] if index < len(self.groups) else None
    if kind is environment_messages.START:
      if group is None or group.worker is not None:
        raise WireError(f'a start of group {index}, which there is not or has begun')
      group.start()
    elif group is None or group.seq % NUMBERS != fields[1] or group.busy_since is not None:
      raise WireError(f'actions {fields[1]} for group {index}, which has not asked for them')
    else:
      actions = self._layout.actions(arrays[0], group.size)
      group.seq += 1
      group.act(actions)

  def lost(self, reason: str) -> None:
    """End the environments: the next session makes new ones. At the end, `close` does."""
    if self.link.closed:
      return
    if self.groups:
      log.warning('environments begin anew when it is back')
    self._end_groups(self._options.deadline)

  def ended(self, complete: bool, reason: str) -> bool:
    """Return whether the run is complete, so that the client ends."""
    if complete:
      log.info('%s', reason)
    return complete

  def _end_groups(self, seconds: float) -> None:
    groups, self.groups = self.groups, []
    for group in groups:
      group.stop()
    # A pool that watches itself may have just begun to replace an environment that hangs.
    allowed = seconds + answer_timer.START_SECONDS * any(g.watches_itself for g in groups)
    end = time.monotonic() + allowed
    for group in groups:
      while not group.join(0.1) and not self.signum and time.monotonic() < end:
        pass
      if not group.join(0.0) and not self.signum:
        raise GroupFailed(f'{self._spec.name}: group {group.index} does not end its step')


def run_all(clients: Sequence[EnvironmentClient]) -> None:
  """Run clients until the run is complete or a client fails. Raises as `EnvironmentClient.look`."""
  why = 'it failed'
  try:
    for client in clients:
      client.start()
    while not any(client.done for client in clients):
      for client in clients:
        client.look(LOOK_SECONDS / len(clients))
    signum = clients[0].signum
    why = signal.Signals(signum).name if signum else 'the run is complete'
  finally:
    with contextlib.ExitStack() as stack:
      for client in clients:
        stack.callback(client.close, why)


def run(options: ClientOptions) -> int:
  """Run `podrace envs`; return the exit code."""
  spec = make_spec(options.env)
  if spec.try_out is not None:
    spec.try_out(options.deadline)
  parts = options.parts()
  clients = [EnvironmentClient(part, spec, len(parts)) for part in parts]

  def on_signal(signum: int, frame: Any) -> None:
    for client in clients:
      client.stop(signum)

  try:
    with on_signals(on_signal):
      run_all(clients)
  except Refused as e:
    log.error('%s', e)
    return 2
  except (GroupFailed, TimeoutError) as e:
    log.error('%s', e)
    return 1
  return 128 + clients[0].signum if clients[0].signum else 0
