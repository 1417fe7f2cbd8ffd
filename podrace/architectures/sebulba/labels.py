"""The order of label requests in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.learning import State, sample_key
from podrace.replay.host import Draw, HostReplay
from podrace.replay.host_labels import LabelRequest
from podrace.topology import on_host


class LabelOrder:
  """Requests the labels of each update, with the parameters of a stated version.

  With lag 0 a batch is labelled with the newest parameters, after the gradient step before it: its
  labels are those that the learner would compute. Otherwise the labels of an update are requested
  during the update before, with the parameters at its beginning, so that the stage labels while
  the learner learns. TRAIN then has the batches of one update.

  Args:
    replay: serves the requests.
    at_once: whether the lag is 0.
  """

  def __init__(self, replay: HostReplay, at_once: bool) -> None:
    self._replay, self._at_once = replay, at_once
    self._ahead = 0  # batches that are labelled for updates to come
    self._version, self._params, self._run_key = 0, None, np.zeros(0)
    self._key: Any = jax.jit(_label_key)

  def start(self, state: State) -> None:
    """Begin at `state`."""
    assert self._replay.labels is not None
    self._run_key = on_host(jax.random.key_data(state.key))
    self.publish(int(jax.device_get(state.update)), state.train.params)
    self._ahead = self._replay.labels.batches

  def publish(self, update: int, params: Any) -> None:
    """Take the parameters after `update` updates."""
    self._version, self._params = update, params

  def learned(self, params: Any) -> None:
    """Take the parameters after a gradient step."""
    if self._at_once:
      self._params = params

  def samples(self, update: int, count: int) -> Iterator[Draw]:
    """Yield the labelled samples of an update, as `HostReplay.samples`."""
    if self._at_once:
      yield from self._replay.samples(count, functools.partial(self._request_missing, update))
      return
    for i in range(self._ahead, count):  # only in the first update that learns
      self._request(update, i)
    left = max(self._ahead - count, 0)  # of a run that went on with fewer batches an update
    following = max(self._replay.due(update + 1) - left, 0)
    self._ahead = left + following
    if not count:
      self._request_range(update + 1, 0, following)
    for i, draw in enumerate(self._replay.samples(count)):
      self._request_range(update + 1, following * i // count, following * (i + 1) // count)
      yield draw

  def _request_missing(self, update: int, i: int) -> None:
    """Request the i-th batch of an update, unless a life with another lag has left one."""
    if self._ahead:
      self._ahead -= 1
    else:
      self._request(update, i)

  def _request_range(self, update: int, first: int, end: int) -> None:
    for i in range(first, end):
      self._request(update, i)

  def _request(self, update: int, i: int) -> None:
    key = self._key(self._run_key, np.int32(update), np.int32(i))
    steps = (update + 1) * self._replay.steps_per_update
    self._replay.label(LabelRequest(self._params, self._version, key, steps))


def _label_key(run_key: Any, update: Any, i: Any) -> Any:
  """Return the key of a batch of labels: that of the first device that learns from the batch."""
  return jax.random.fold_in(sample_key(jax.random.wrap_key_data(run_key), update, i), 0)
