"""Processes that may have few files open: connections that nobody asked for leave them enough."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import socket as sockets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bare
import pytest
from children import SUPPORT, environment, until
from peers import Envs
from processes import Podrace, as_users_have_it, cache, checkpoints, lines

from podrace.distributed.net import descriptors, session_messages
from podrace.distributed.net.address import host_and_port

STRANGERS = 1300
LIMIT = 1100


@pytest.fixture(scope='module', autouse=True)
def many_files() -> Iterator[None]:
  """For this process, which has the strangers' ends."""
  before = resource.getrlimit(resource.RLIMIT_NOFILE)
  if descriptors.raise_limit() < 3 * STRANGERS:
    pytest.skip('this process may not have the files that it takes')
  yield
  resource.setrlimit(resource.RLIMIT_NOFILE, before)


def silent(stack: contextlib.ExitStack, address: str, count: int) -> list[sockets.socket]:
  """So many connections that say nothing."""
  host, port = host_and_port(address)
  return [
    stack.enter_context(sockets.create_connection((host, int(port)), 60)) for _ in range(count)
  ]


class Few:
  """few_files.py."""

  def __init__(self, limit: int) -> None:
    self.process = subprocess.Popen(
      [sys.executable, str(SUPPORT / 'few_files.py'), str(limit)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    self.begun = self.hear()

  def hear(self) -> dict[str, Any]:
    assert self.process.stdout is not None
    return json.loads(self.process.stdout.readline())

  def ask(self, line: str) -> dict[str, Any]:
    assert self.process.stdin is not None
    self.process.stdin.write(f'{line}\n')
    self.process.stdin.flush()
    return self.hear()

  def __enter__(self) -> Few:
    return self

  def __exit__(self, *exc: object) -> None:
    self.process.communicate(timeout=60)
    assert self.process.returncode == 0


@pytest.mark.parametrize('limit', [64, 200, LIMIT])
def test_connections_of_all_listeners_leave_a_quarter_of_the_descriptors(limit: int) -> None:
  with Few(limit) as few, contextlib.ExitStack() as stack:
    begun, addresses = few.begun, few.begun['addresses']
    reserve = begun['room'] // 4
    assert 2 * begun['guests'] + begun['sessions'] + reserve <= begun['room']
    for address in addresses:
      silent(stack, address, limit)
    until(lambda: min(few.ask('look')['connections']) >= limit)
    asked = few.ask('look')
    assert asked['guests'] == [begun['guests']] * 2 and asked['free'] >= reserve
    welcome = 0
    for i in range(begun['sessions'] + 2):  # each listener has room for new clients all the while
      end = stack.enter_context(bare.connect(addresses[i % 2], session_messages.of_listeners()))
      end.say(session_messages.HELLO, session_messages.hello('test', 0))
      heard = end.hear()
      assert heard is not None
      welcome += heard[0] is session_messages.WELCOME
      is_waiting = heard[0] is session_messages.WAIT and 'ulimit' in heard[1][0]
      assert heard[0] is session_messages.WELCOME or is_waiting
    asked = few.ask('look')
    assert welcome == sum(asked['peers']) == begun['sessions'] and asked['free'] >= reserve


def test_a_listener_without_descriptors_rests_and_goes_on() -> None:
  with Few(100) as few, contextlib.ExitStack() as stack:
    address = few.begun['addresses'][0]
    before = few.ask('take')
    assert before['held'] and not before['free']
    silent(stack, address, 5)
    asked = few.ask('tick')
    assert 1 <= asked['errors'] <= asked['ticks'] - before['ticks'] + 2  # it does not spin
    few.ask('release')
    with bare.connect(address, session_messages.of_listeners()) as end:
      end.hello('test')


def lower_the_limit() -> None:
  resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


@pytest.mark.slow
def test_a_learner_trains_and_saves_while_strangers_connect(tmp_path: Path, cache: Path) -> None:
  run_dir, env = tmp_path / 'run', 'gymnasium:CartPole-v1'
  learner = Podrace(
    ['train', 'catch', '--env', env, '--architecture', 'sebulba', '--num-envs', '8', '--unroll-length', '8',
     '--agent.network.hidden', '16', '--actor-threads', '2', '--envs', 'remote', '--listen', bare.ANY,
     '--metrics-listen', '127.0.0.1:*', '--log-every', '640', '--checkpoint-every', '1280',
     '--total-steps', '100_000_000', '--run-dir', str(run_dir)],
    tmp_path / 'learner.txt', 1, cache, lower_the_limit,
  )  # fmt: skip
  learner.says('podrace envs --connect')
  address = re.findall(r'podrace envs --connect (tcp://\S+)', learner.output)[0]
  metrics = re.findall(r'http://(127.0.0.1:\d+)/metrics', learner.output)[0]
  envs = Envs(address, tmp_path / 'envs', '--num-envs', '8', env=env)
  with envs, contextlib.ExitStack() as stack:
    until(lambda: lines(run_dir))
    for where, count in ((address, STRANGERS), (f'tcp://{metrics}', 200)):
      silent(stack, where, count)
    saved = until(lambda: checkpoints(run_dir))[-1]
    until(lambda: checkpoints(run_dir)[-1] >= saved + 3 * 1280)
    learner.signal(signal.SIGTERM)
    assert learner.wait() == 143, learner.output
  assert 'Errno' not in learner.output
