"""What the network can do to a client and a learner, by a proxy between them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import until
from peers import Envs, Learner, assert_whole, lives
from proxy import Proxy


@contextlib.contextmanager
def between(tmp_path: Path, peer_timeout: float = 1.0) -> Iterator[tuple[Learner, Proxy, Envs]]:
  """A learner, a proxy and a client that steps; at the end, what arrived must be whole."""
  with Learner(slots=2, peer_timeout=peer_timeout) as learner:
    with (
      Proxy(learner.address) as proxy,
      Envs(proxy.address, tmp_path / 'log', '--num-envs', '2') as envs,
    ):
      until(lambda: learner.steps > 50)
      yield learner, proxy, envs
    counts = learner.server.counts
    until(lambda: learner.steps == counts['frames'] - counts['withdrawn'])  # the last is taken
    found = lives(learner.arrivals)
    assert_whole(found)
    assert counts['malformed'] == 0
    assert sum(map(len, found.values())) == learner.steps


def goes_on(learner: Learner) -> None:
  before = learner.steps
  until(lambda: learner.steps > before + 50)


@pytest.mark.parametrize(
  'directions',
  [
    pytest.param(('up', 'down'), id='both'),
    pytest.param(('up',), id='to the learner', marks=pytest.mark.slow),
    pytest.param(('down',), id='to the client', marks=pytest.mark.slow),
  ],
)
def test_a_cut_is_noticed_and_outlived(directions: tuple[str, ...], tmp_path: Path) -> None:
  with between(tmp_path) as (learner, proxy, envs):
    for direction in directions:
      setattr(proxy, direction, False)
    if 'up' in directions:  # else the client's PINGs arrive, until it gives up
      learner.says('silent')
    until(lambda: 'anew' in envs.output)
    for direction in directions:
      setattr(proxy, direction, True)
    goes_on(learner)


@pytest.mark.slow
def test_a_cut_of_30_seconds(tmp_path: Path) -> None:
  with between(tmp_path, peer_timeout=5.0) as (learner, proxy, envs):
    proxy.up = proxy.down = False
    learner.says('--connect')
    with pytest.raises(subprocess.TimeoutExpired):  # it does not end
      envs.process.wait(30)
    proxy.up = proxy.down = True
    goes_on(learner)


def test_a_delay_of_200_ms_is_slow_and_nothing_else(tmp_path: Path) -> None:
  with between(tmp_path) as (learner, proxy, envs):
    proxy.delay = 0.2
    before, began = learner.steps, time.monotonic()
    until(lambda: learner.steps > before + 16)
    assert time.monotonic() - began > 1.0
    assert envs.output.count('joined') == 1


def test_connections_that_are_reset(tmp_path: Path) -> None:
  """They are back before the learner could have found out by itself, and have all slots."""
  with between(tmp_path, peer_timeout=600.0) as (learner, proxy, envs):
    for i in range(3):
      proxy.reset()
      until(lambda i=i: envs.output.count('joined') >= i + 2)
      goes_on(learner)
    until(lambda: learner.server.counts['dropped'] >= 3)
    assert envs.output.count(' is over: ') == 3  # each is said once, whichever call noticed it
    assert envs.output.count('anew') == 3
