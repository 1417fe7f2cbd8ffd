"""`podrace envs` as processes, with a stub in the learner's place: what they survive."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from children import ROOT, until
from peers import Envs, Learner, assert_whole, lives, spec
from podrace.remote.top import Asker

from podrace.envs.host import base as host
from podrace.envs.host.base import PoolArgs
from podrace.remote import dial, security, wire
from podrace.remote.client import Client, Group, Options, group_sizes


def both_step(learner: Learner, turns: int) -> bool:
  """The one client's two groups, of which either may begin long before the other, have had so many turns."""
  peers = list(learner.server.peers.values())
  groups = [g for p in peers for g in list(p.groups.values())]
  return len(groups) == 2 and all(g.seq > turns for g in groups)


def test_it_steps_environments_and_they_are_whole(tmp_path: Path) -> None:
  with Learner(slots=8) as learner:
    with Envs(learner.address, tmp_path / 'log', '--num-envs', '4', '--workers', '2') as envs:
      until(lambda: learner.steps > 400 and both_step(learner, 10))
      (peer,) = learner.server.peers.values()
      assert [group.size for group in peer.groups.values()] == [2, 2]
      envs.signal(signal.SIGTERM)
      assert envs.wait() == 143
      # It says BYE, which is lost where the connection is reset: then its silence tells.
      until(lambda: learner.server.counts['dropped'] == 1)
      assert any('left: SIGTERM' in x or 'gone' in x or 'silent' in x for x in learner.said)
    found = lives(learner.arrivals)
    assert len(found) == 4
    assert_whole(found)


def test_ctrl_c_is_130(tmp_path: Path) -> None:
  with Learner() as learner, Envs(learner.address, tmp_path / 'log') as envs:
    until(lambda: learner.steps > 10)
    envs.signal(signal.SIGINT)
    assert envs.wait() == 130


def all_step(learner: Learner, dropped: int) -> bool:
  """So many clients are gone, and all slots are those of others that step."""
  groups = [g for p in list(learner.server.peers.values()) for g in list(p.groups.values())]
  gone = learner.server.counts['dropped'] == dropped
  return gone and not learner.pools[0].free and all(g.seq for g in groups)


def kills(tmp_path: Path, count: int) -> None:
  """Clients are killed at random moments; others come in their place at once, as connections end with processes."""
  moments = random.Random(0)
  with Learner(slots=4, peer_timeout=600.0, max_wait=0.001) as learner:
    running: list[Envs] = []
    try:
      for i in range(2):
        running.append(Envs(learner.address, tmp_path / f'first {i}', '--num-envs', '2'))
      for i in range(count):
        until(lambda i=i: all_step(learner, i))
        before = learner.steps + moments.randint(1, 60)
        until(lambda b=before: learner.steps > b)
        victim = running.pop(moments.randrange(2))
        victim.kill()
        running.append(Envs(learner.address, tmp_path / f'{2 + i}', '--num-envs', '2'))
      until(lambda: all_step(learner, count))
      before = learner.steps + 60
      until(lambda: learner.steps > before)
      for one in running:
        one.signal(signal.SIGTERM)
        assert one.wait() == 143
    finally:
      for one in running:
        one.__exit__()
    counts = learner.server.counts
    until(lambda: counts['frames'] == learner.steps + counts['withdrawn'])  # the last is taken
    found = lives(learner.arrivals)
    assert_whole(found)
    assert sum(map(len, found.values())) == learner.steps
    assert len(found) == 4 + 2 * count
    assert counts['sessions'] == counts['dropped'] == 2 + count
    assert counts['malformed'] == 0
    assert sorted(learner.pools[0].free) == [0, 1, 2, 3]


def test_killed_clients_lose_and_duplicate_nothing(tmp_path: Path) -> None:
  kills(tmp_path, 4)


@pytest.mark.slow
def test_a_hundred_killed_clients(tmp_path: Path) -> None:
  kills(tmp_path, 100)


def test_a_frozen_client_is_dropped_and_comes_back(tmp_path: Path) -> None:
  with Learner(slots=2, peer_timeout=1.0) as learner:
    with Envs(learner.address, tmp_path / 'log', '--num-envs', '2') as envs:
      until(lambda: learner.steps > 50)
      envs.signal(signal.SIGSTOP)
      learner.says('silent for')
      learner.says('no environments are connected')
      before = learner.steps
      envs.signal(signal.SIGCONT)
      until(lambda: learner.steps > before + 50)
      envs.says('environments begin anew when it is back')
    found = lives(learner.arrivals)
    assert_whole(found)
    assert {run for _, _, run in found} == {0, 1}


def test_a_client_outlives_learners_and_ends_with_the_last(tmp_path: Path) -> None:
  with Learner() as learner:
    address = learner.address
    envs = Envs(address, tmp_path / 'log', '--num-envs', '2')
    until(lambda: learner.steps > 20)
  with envs:
    envs.says('the learner has stopped; environments begin anew when it is back')
    with Learner(address=address) as again:
      until(lambda: again.steps > 20)
      assert_whole(lives(again.arrivals))
      again.server.finished()
    assert envs.wait() == 0
    assert 'the run is complete' in envs.output


def test_the_end_and_the_cut_may_come_at_once(tmp_path: Path) -> None:
  with zmq.Context() as context, context.socket(zmq.ROUTER) as learner:
    learner.linger, learner.rcvtimeo = 10_000, 60_000
    address = f'tcp://127.0.0.1:{learner.bind_to_random_port("tcp://127.0.0.1")}'
    with Envs(address, tmp_path / 'log', '--num-envs', '2', '--groups', '1') as envs:
      peer, hello = learner.recv_multipart()
      told = wire.unpack(hello)[1]
      welcome = dict(nonce=told['nonce'], largest_group=2, silence=60.0, env=told['env'])
      learner.send_multipart([peer, wire.pack(wire.WELCOME, 1, welcome)])
      assert wire.unpack(learner.recv_multipart()[1])[0] == wire.ENTER  # and it has no more to say
      envs.signal(signal.SIGSTOP)
      learner.send_multipart([peer, wire.pack(wire.END, True, 'the run is complete')])
      learner.close()
      context.term()
      envs.signal(signal.SIGCONT)
      assert envs.wait() == 0
      assert 'the run is complete' in envs.output and 'begin anew' not in envs.output


def test_a_killed_worker_is_another_life_and_not_another_session(tmp_path: Path) -> None:
  with Learner() as learner:
    with Envs(learner.address, tmp_path / 'log', '--num-envs', '2', '--workers', '2') as envs:
      until(lambda: both_step(learner, 10))  # a worker that dies at its start ends the client
      workers = [int(p) for p in os.popen(f'pgrep -P {envs.process.pid}').read().split()]
      os.kill(workers[0], signal.SIGKILL)
      until(lambda: any(a.run_id.any() for _, a in learner.arrivals[-1000:]))
    assert learner.server.counts['sessions'] == 1
    assert_whole(lives(learner.arrivals))


def test_a_worker_that_hangs_is_replaced_in_the_same_session(tmp_path: Path) -> None:
  """Where client and learner allow as much for a step, as they do by default."""
  wrong = f'gymnasium:host_envs:Wrong-v0,what=hang,once={tmp_path}/once'
  args = ['--num-envs', '2', '--workers', '2', '--env-deadline', '2']
  with (
    Learner(deadline=2.0) as learner,
    Envs(learner.address, tmp_path / 'log', *args, env=wrong) as envs,
  ):
    envs.says('it did not answer for 2 s')
    until(lambda: any(a.run_id.any() for _, a in learner.arrivals[-1000:]))
    before = learner.steps
    until(lambda: learner.steps > before + 20)
    assert learner.server.counts['sessions'] == 1
    assert_whole(lives(list(learner.arrivals)))


def test_environments_with_other_options_are_told_at_both_ends(tmp_path: Path) -> None:
  one, other = 'gymnasium:host_envs:Sequence-v0,length=5', 'gymnasium:host_envs:Sequence-v0'
  with Learner(host.make(one)) as learner:
    learner.says(f'--env {one}`')
    with Envs(learner.address, tmp_path / 'other', env=other) as envs:
      envs.says(f'these environments are {other}, the learner is one of {one}: ')
      learner.says(f'joins with {other}, this run is of {one}: ')
      until(lambda: learner.steps > 20)
    with Envs(learner.address, tmp_path / 'one', env=one) as envs:
      envs.says('joined the learner')
      until(lambda: learner.server.counts['sessions'] == 2)
    assert 'these environments are' not in envs.output


@pytest.mark.parametrize(
  ('name', 'full'),
  [
    ('ale:pong', 'ale:pong'),
    ('ale:pong,stack=4,sticky=0', 'ale:pong'),
    ('ale:pong,sticky=0.250,clip_rewards=false', 'ale:pong,clip_rewards=false,sticky=0.25'),
    ('gymnasium:host_envs:Sequence-v0', 'gymnasium:host_envs:Sequence-v0'),
    ('gymnasium:host_envs:Sequence-v0,slow=1e-1,length=3', 'gymnasium:host_envs:Sequence-v0,length=3,slow=0.1'),
    ('envpool:CartPole-v1,max_episode_steps=50', 'envpool:CartPole-v1,max_episode_steps=50'),
  ],
)  # fmt: skip
def test_names_have_the_options_that_are_no_defaults(name: str, full: str) -> None:
  assert host.make(name).name == host.make(full).name == full


def test_an_environment_that_fails_is_told_at_both_ends(tmp_path: Path) -> None:
  wrong = 'gymnasium:host_envs:Wrong-v0,what=raise'
  with Learner() as learner, Envs(learner.address, tmp_path / 'log', env=wrong) as envs:
    assert envs.wait() == 1
    assert 'ZeroDivisionError: the game broke' in envs.output
    learner.says('left: it failed')


def test_refused_with_both_sides_printed_at_both_ends(tmp_path: Path) -> None:
  with Learner(spec(shape=(7,))) as learner:
    with Envs(learner.address, tmp_path / 'log') as envs:
      assert envs.wait() == 2
      line = 'observation: the learner has Box <f4 of shape [7]'
      assert line in envs.output and 'the environments Box <f4 of shape [4]' in envs.output
    learner.says(line)


def test_nobody_there_is_told_and_can_be_given_up(tmp_path: Path) -> None:
  with Learner() as learner:
    address = learner.address
  with Envs(address, tmp_path / 'log', '--give-up-after', '1.5') as envs:
    assert envs.wait() == 1
    assert f'no learner at {address} for 2 s' in envs.output


def test_a_learner_that_is_getting_ready_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
  client = Client(Options('tcp://127.0.0.1:9', 'test:spec', give_up=1.0), spec())
  client._connect()
  client._alone_since -= 10
  client._message([wire.pack(wire.WAIT, 'the learner is getting ready')])
  client._look_at_the_clock()
  client._alone_since -= 10
  with pytest.raises(TimeoutError, match='no learner at'):
    client._look_at_the_clock()
  client._leave()


@pytest.mark.parametrize(
  'args',
  [
    ['--connect', 'tcp://127.0.0.1:1', '--env', 'podrace:catch'],
    ['--connect', 'tcp://127.0.0.1:1', '--env', 'ale:no_such_game'],
    ['--connect', 'tcp://127.0.0.1:1', '--env', 'ale:pong', '--num-envs', 'x'],
    ['--connect', 'tcp://127.0.0.1:1', '--env', 'ale:pong', '--num-envs', '0'],
    ['--connect', 'tcp://127.0.0.1:1'],
    ['--conect', 'tcp://127.0.0.1:1'],
  ],
)
def test_bad_usage_is_2(args: list[str]) -> None:
  done = subprocess.run(
    [sys.executable, '-m', 'podrace.cli', 'envs', *args],
    capture_output=True, text=True, check=False, env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )  # fmt: skip
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('podrace: ')


def test_a_start_of_what_there_is_not_or_has_begun_is_none() -> None:
  client = Client(Options('tcp://127.0.0.1:9', 'test:spec'), spec())
  begun = Group(0, spec(), PoolArgs(1, 1, np.zeros(1, np.uint32), 1, 1.0), lambda out: None)
  begun._thread = threading.current_thread()
  client._session, client._groups = 5, [begun]
  for index in (0, 1):
    with pytest.raises(wire.WireError, match=f'a start of group {index}'):
      client._message([wire.pack(wire.START, 5, index)])
  client._context.term()


def test_it_imports_no_jax() -> None:
  """Nor anything that is heavy: what is imported is counted, with the trial of somebody's own environment."""
  code = (
    'import sys; import podrace.remote.client, podrace.remote.top, podrace.envs.host.ale\n'
    'podrace.remote.client.make_spec("gymnasium:CartPole-v1")\n'
    'wrong = {"jax", "jaxlib", "flax", "optax", "orbax", "tyro", "rich"} & set(sys.modules)\n'
    'assert not wrong, wrong\n'
    'print(len([m for m in sys.modules if m.startswith("podrace")]))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) <= 25


@pytest.mark.parametrize('wrong', [
  {'largest_group': 0}, {'largest_group': -3}, {'largest_group': 2.5}, {'largest_group': True}, {'silence': 0.0},
  {'silence': float('nan')}, {'silence': float('inf')}, {'silence': 'x'}, {'silence': -1.0},
])  # fmt: skip
def test_a_welcome_that_is_none(wrong: dict[str, Any]) -> None:
  """A learner that says nonsense is lost; it ends no environments' process."""
  client = Client(Options('tcp://127.0.0.1:9', 'test:spec'), spec())
  told = {'nonce': 0, 'largest_group': 4, 'silence': 1.0, 'env': 'x', **wrong}
  with pytest.raises(wire.WireError, match='a welcome with'):
    client._message([wire.pack(wire.WELCOME, 5, told)])
  assert client._session is None and not client._groups
  client._context.term()


@pytest.mark.parametrize('case', ['nobody', 'other keys', 'not listed', 'no keys', 'silent'])
def test_who_waits_is_told_what_is_wrong(case: str, tmp_path: Path) -> None:
  """`podrace envs`, and `podrace top` likewise."""
  keys, other = tmp_path / 'keys', tmp_path / 'other'
  security.new_keys(keys)
  security.new_keys(other)
  if case == 'not listed':
    (other / security.SERVER_PUBLIC).write_bytes((keys / security.SERVER_PUBLIC).read_bytes())
  own = None if case in ('nobody', 'no keys', 'silent') else other
  reason = {
    'nobody': dial.NOBODY, 'not listed': dial.NOT_LISTED, 'silent': dial.SAYS_NOTHING,
  }.get(case, dial.OTHER_KEYS)  # fmt: skip
  with contextlib.ExitStack() as stack:
    address = 'tcp://127.0.0.1:9'
    if case == 'silent':
      router = stack.enter_context(zmq.Context()).socket(zmq.ROUTER)
      stack.callback(router.close, 0)
      address = f'tcp://127.0.0.1:{router.bind_to_random_port("tcp://127.0.0.1")}'
    elif case != 'nobody':
      address = stack.enter_context(Learner(keys=keys)).address
    client = Client(Options(address, 'test:spec', keys=own, give_up=1.0), spec())
    with pytest.raises(TimeoutError) as told:
      client.run()
    assert reason in str(told.value)
    asker = Asker(address, own, False)
    with pytest.raises(TimeoutError) as told:
      asker.ask()
    asker.close()
    assert reason in str(told.value)


@pytest.mark.parametrize(
  ('num_envs', 'groups', 'largest', 'sizes'),
  [
    (64, 0, 64, [32, 32]), (64, 0, 16, [16] * 4), (64, 0, 20, [16] * 4), (1, 0, 8, [1]),
    (7, 3, 8, [3, 2, 2]), (5, 1, 8, [5]),
  ],
)  # fmt: skip
def test_group_sizes(num_envs: int, groups: int, largest: int, sizes: list[int]) -> None:
  assert group_sizes(num_envs, groups, largest) == sizes


def test_group_sizes_that_cannot_be() -> None:
  with pytest.raises(ValueError, match='--groups 2: an actor thread'):
    group_sizes(64, 2, 16)
  with pytest.raises(ValueError, match='at most 256 groups of 1'):
    group_sizes(1000, 0, 1)
