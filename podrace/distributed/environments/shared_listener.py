"""Who has the network of a learner's server."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from podrace.distributed.net.listener import Listener
from podrace.system.threads import Worker

if TYPE_CHECKING:
  from podrace.distributed.environments.pool import RemotePool

CARE = 0.05  # seconds between looks at the network while all actor threads are busy
GOODBYE = 1.0  # seconds that clients have to answer that the run has ended


class SharedNetwork:
  """A listener, from `open` to `close`, whose network one thread at a time has.

  It is a thread that waits for environments, if there is any: so between a message and its answer there is no other
  thread. While all are busy a thread of its own looks after it now and then.

  Args:
    pools: of the actor threads; others may come and go.

  Attributes:
    lead: held by the thread that has the network.
    failure: the traceback of what has failed in it; None if nothing has.
  """

  def __init__(self, listener: Listener, pools: Sequence[RemotePool]) -> None:
    self._listener, self._pools = listener, pools
    self.lead = threading.Lock()
    self.failure: str | None = None
    self._over = False, 'the learner has stopped'
    self._stop = threading.Event()
    self._worker: Worker | None = None

  def open(self) -> None:
    """Listens, from now on."""
    self._listener.open()
    self._worker = Worker('remote', self._main)

  def finish(self) -> None:
    """The run is complete: clients hear it, and need not wait for another. Nobody is served any more."""
    self._over = True, 'the run is complete'
    self._end()

  def _end(self) -> None:
    self._stop.set()
    if self._worker is not None:
      self._worker.wait(5.0)

  def close(self) -> None:
    """Ends all connections, after clients have heard why."""
    self._end()
    if not self.lead.acquire(timeout=5.0):
      raise RuntimeError('a thread does not give back the network')
    self._listener.close()

  def call(self, do: Callable[..., None], *args: Any) -> None:
    """Does something at once, or has it done by the thread that has the network.

    Raises:
      RuntimeError: if one of them has failed.
    """
    self._listener.later(functools.partial(do, *args))
    if not self._as_leader(self._listener.do_calls):
      self._listener.wake()

  def turn(self, wait: float) -> bool:
    """Listens for up to `wait` seconds, and deals with what comes; False if another thread does.

    Raises:
      RuntimeError: if it failed, now or before.
    """
    return self._as_leader(self._listener.turn, wait)

  def pass_on(self) -> None:
    """Has a thread that waits for environments take the network, after this one has had it."""
    for pool in self._pools:
      if pool.waiting:
        pool.nudge()
        return

  def _as_leader(self, do: Callable[..., None], *args: Any) -> bool:
    if self.failure:
      raise RuntimeError(f'the network has failed:\n{self.failure}')
    if self._stop.is_set() or not self.lead.acquire(blocking=False):  # at the end it is `_main`'s
      return False
    try:
      do(*args)
    except BaseException as e:
      self.failure = traceback.format_exc()
      failed = f'the network failed:\n{self.failure}'
      self._listener.log(failed, logging.ERROR, always=True)
      raise RuntimeError(failed) from e
    finally:
      self.lead.release()
    return True

  def _main(self) -> None:
    """Looks after the network while nobody else does, and takes leave at the end."""
    while not self._stop.wait(CARE):
      with contextlib.suppress(RuntimeError):  # which is said already, and to the actor threads
        self.turn(0.0)
      self.pass_on()  # who found the network taken waits to be given it
    self._listener.wake()
    with self.lead:
      if self.failure is None:
        self._listener.end(*self._over, GOODBYE)
