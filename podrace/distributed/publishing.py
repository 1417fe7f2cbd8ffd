"""Publishing of a learner's parameters to the processes that work for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podrace.distributed import parameters
from podrace.distributed.batches import POLL
from podrace.distributed.net.process_metrics import logged
from podrace.distributed.parameters import ACTING, LABELLING, REANALYSING
from podrace.distributed.run_identity import (
  FINISHED,
  RECORD,
  RUN,
  Addresses,
  differences,
  record,
  to_leaves,
  worker_command,
)
from podrace.errors import ReplayFailed
from podrace.hooks import labels_elsewhere
from podrace.settings.config import Config

GOODBYE_SECONDS = 5.0  # for acting processes to notice that the run is complete
REMIND = 30.0  # seconds between warnings that no process acts
WAITED_FOR = {ACTING: ('acting', 'experience'), LABELLING: ('labelling', 'labels')}
log = logging.getLogger('podrace.distributed')


class Publishing:
  """Publishes parameters, and counts their readers.

  Only the first of several learner processes publishes.

  Owner: the learner's source, which calls `close`.
  Raises: ReplayFailed from `publish` and `check`, if the thread of the publisher has failed.

  Args:
    addresses: the address at which to listen, and keys.
    config: the run's config.
    every: the shortest time between versions, in seconds.
    run: the name of the run.
    program: returns the learner's part of `podrace top`.
  """

  def __init__(
    self,
    addresses: Addresses,
    config: Config,
    every: float,
    run: str,
    program: Callable[[], dict[str, Any]],
  ) -> None:
    a = addresses
    self._addresses, self._config, self._every = a, config, every
    self._text = np.frombuffer(json.dumps({**record(config), RUN: run}).encode(), np.uint8)
    self._version, self._at = -1, 0.0
    self._labelled = labels_elsewhere(config.agent)
    self._reminded: dict[str, float] = {}  # role -> time of the warning
    self._publisher: parameters.Publisher | None = None
    if jax.process_index() == 0:
      self._publisher = parameters.Publisher(
        a.parameters,
        a.keys,
        a.insecure,
        a.peer_timeout,
        a.announce,
        config.num_envs,
        program,
        functools.partial(differences, record(config)),
      )

  def publish(self, update: int, params: Any, *more: tuple[str, np.ndarray]) -> None:
    """Publish the parameters after `update` updates, and further named arrays.

    Raises:
      ReplayFailed: if its thread has failed.
    """
    if self._publisher is None:
      return
    self._version = max(self._version + 1, update)
    try:
      self._publisher.publish(self._version, [*to_leaves(params), (RECORD, self._text), *more])
    except RuntimeError as e:
      raise ReplayFailed(str(e)) from e
    self._at = time.monotonic()

  def publish_now_and_then(self, update: int, params: Any, *more: tuple[str, np.ndarray]) -> None:
    """Publish as `publish`, if the last version is old enough. A failure is left to `check`."""
    if time.monotonic() > self._at + self._every:
      with contextlib.suppress(ReplayFailed):
        self.publish(update, params, *more)

  @property
  def failed(self) -> bool:
    """Whether its thread has failed."""
    return self._publisher is not None and bool(self._publisher.failure)

  def check(self) -> None:
    """Raise ReplayFailed if its thread has failed."""
    if self._publisher is not None and self._publisher.failure:
      raise ReplayFailed(self._publisher.failure)

  @property
  def missing(self) -> list[str]:
    """The roles of which the run needs a process, and none is connected."""
    if self._publisher is None:
      return []
    needed = (ACTING, LABELLING) if self._labelled else (ACTING,)
    return [role for role in needed if not self._publisher.clients(role)]

  def warn_if_alone(self) -> None:
    """Warn that no process acts or labels, while the learner waits, every REMIND seconds."""
    if self._publisher is None:
      return
    missing, now = self.missing, time.monotonic()
    self._reminded = {role: at for role, at in self._reminded.items() if role in missing}
    for role in missing:
      if now - self._reminded.get(role, -math.inf) > REMIND:
        self._reminded[role] = now
        there = dataclasses.replace(self._addresses, parameters=self._publisher.reachable)
        log.warning(
          'no %s process is connected; waiting for %s of `%s`',
          *WAITED_FOR[role], worker_command(role, self._config, there),
        )  # fmt: skip

  def metrics(self) -> dict[str, float]:
    """Return metrics of the connected processes."""
    if self._publisher is None:
      return {}
    roles = {'acting': ACTING, 'reanalysing': REANALYSING}
    if self._labelled:
      roles = {'acting': ACTING, 'labelling': LABELLING}
    clients = {name: self._publisher.clients(role) for name, role in roles.items()}
    metrics: dict[str, float] = {f'{name}_processes': len(x) for name, x in clients.items()}
    for name, measures in clients.items():
      metrics |= logged(name, measures)
    return metrics

  def finish(self, update: int, params: Any) -> None:
    """Publish that the run is complete, and wait for the acting processes to leave."""
    if self._publisher is None:
      return
    self.publish(update, params, (FINISHED, np.ones(1, np.uint8)))
    self._publisher.finish()
    end = time.monotonic() + GOODBYE_SECONDS
    while self._publisher.waited_for and time.monotonic() < end:
      time.sleep(POLL)

  def close(self) -> None:
    """Close the publisher."""
    if self._publisher is not None:
      self._publisher.close()
