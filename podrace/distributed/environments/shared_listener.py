"""A listener that the actor threads of a learner share."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from podrace.distributed.net.listener import Listener
from podrace.system.threads import Worker

IDLE_TURN_SECONDS = 0.05  # between turns of the network while all actor threads are busy
GOODBYE_SECONDS = 1.0  # that clients have to answer that the run has ended


class Waits(Protocol):
  """A pool with a thread that may wait for environments.

  Attributes:
    waiting: whether the thread is in `recv`.
  """

  waiting: bool

  def nudge(self) -> None:
    """Make the waiting thread take the network."""


class SharedNetwork:
  """A listener with a network that one thread owns at a time.

  A thread that waits for environments serves the network, so no other thread is between a message
  and its answer. While all of them are busy, a thread of this object serves it now and then.

  Owner: the Server, which calls `open` and `close`.
  Ends when: `finish` or `close` is called.

  Args:
    pools: of the actor threads; the list may change.

  Attributes:
    lead: lock of the thread that serves the network.
    failure: traceback of the exception that ended the network, or None.
  """

  def __init__(self, listener: Listener, pools: Sequence[Waits]) -> None:
    self._listener, self._pools = listener, pools
    self.wake, self.counts = listener.wake, listener.counts
    self.lead = threading.Lock()
    self.failure: str | None = None
    self._goodbye = False, 'the learner has stopped'
    self._stop = threading.Event()
    self._worker: Worker | None = None

  def open(self) -> None:
    """Start to listen."""
    self._listener.open()
    self._worker = Worker('remote', self._main)

  def finish(self) -> None:
    """Tell clients that the run is complete, so that they end too. Nothing is served afterwards."""
    self._goodbye = True, 'the run is complete'
    self._end()

  def _end(self) -> None:
    self._stop.set()
    if self._worker is not None:
      self._worker.wait(5.0)

  def close(self) -> None:
    """End all connections, after clients have heard the reason."""
    self._end()
    if not self.lead.acquire(timeout=5.0):
      raise RuntimeError('a thread does not give back the network')
    self._listener.close()

  def call(self, do: Callable[..., None], *args: Any) -> None:
    """Call a function here if the network is free, else in the thread that serves it.

    Raises:
      RuntimeError: if the network has failed.
    """
    self._listener.later(functools.partial(do, *args))
    if not self._as_leader(self._listener.do_calls):
      self._listener.wake()

  def turn(self, wait: float) -> bool:
    """Serve the network for up to `wait` seconds, unless another thread does.

    Returns:
      False if another thread serves it.

    Raises:
      RuntimeError: if the network has failed.
    """
    return self._as_leader(self._listener.turn, wait)

  def pass_on(self) -> None:
    """Make a thread that waits for environments take the network."""
    for pool in self._pools:
      if pool.waiting:
        pool.nudge()
        return

  def _as_leader(self, do: Callable[..., None], *args: Any) -> bool:
    if self.failure:
      raise RuntimeError(f'the network has failed:\n{self.failure}')
    # After `_stop` only `_main` may have it.
    if self._stop.is_set() or not self.lead.acquire(blocking=False):
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
    """Serve the network while all actor threads are busy, and say goodbye at the end."""
    while not self._stop.wait(IDLE_TURN_SECONDS):
      with contextlib.suppress(RuntimeError):  # logged, and raised in the actor threads
        self.turn(0.0)
      self.pass_on()  # a thread that came while the network was taken waits for this
    self._listener.wake()
    with self.lead:
      if self.failure is None:
        self._listener.end(*self._goodbye, GOODBYE_SECONDS)
