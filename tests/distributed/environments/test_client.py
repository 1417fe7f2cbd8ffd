"""`podrace envs` as processes, with a stub in the learner's place: what they survive."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import bare
import numpy as np
import pytest
from children import ROOT, until
from peers import Envs, Learner, assert_whole, lives, spec
from shorthand import Patch, slow_after

from podrace import cli
from podrace.distributed.environments import client as environment_client
from podrace.distributed.environments import environment_messages
from podrace.distributed.environments import server as environment_server
from podrace.distributed.environments.client import EnvironmentClient, run_all
from podrace.distributed.environments.client_options import ClientOptions, group_sizes
from podrace.distributed.environments.group_thread import GroupFailed, GroupThread
from podrace.distributed.net import connecting, dashboard, session_messages
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net.dashboard import Asker
from podrace.distributed.net.link import Refused
from podrace.envs.host import base as host
from podrace.envs.host.base import PoolArgs
from podrace.system.threads import Worker


def both_step(learner: Learner, turns: int) -> bool:
  """The one client's two groups, of which either may begin long before the other, have had so many turns."""
  peers = list(learner.server.peers)
  groups = [g for p in peers for g in list(p.state.groups.values())]
  return len(groups) == 2 and all(g.seq > turns for g in groups)


def test_it_steps_environments_and_they_are_whole(tmp_path: Path) -> None:
  with Learner(slots=8) as learner:
    with Envs(learner.address, tmp_path / 'log', '--num-envs', '4', '--workers', '2') as envs:
      until(lambda: learner.steps > 400 and both_step(learner, 10))
      (peer,) = learner.server.peers
      assert [group.size for group in peer.state.groups.values()] == [2, 2]
      envs.signal(signal.SIGTERM)
      assert envs.wait() == 143
      # It says BYE, which is lost where the connection is reset: then its silence tells.
      until(lambda: learner.server.counts['dropped'] == 1)
      assert any('left: SIGTERM' in x or 'gone' in x or 'silent' in x for x in learner.said)
    found = lives(learner.arrivals)
    assert len(found) == 4
    assert_whole(found)


def test_numbers_of_steps_begin_anew_after_the_last_one(tmp_path: Path, monkeypatch: Patch) -> None:
  """Here after 4 steps, at both ends."""
  for end in (environment_client, environment_server):
    monkeypatch.setattr(end, 'NUMBERS', 4)
  env = host.make('envpool:CartPole-v1')
  with Learner(env, slots=8) as learner:
    client = EnvironmentClient(ClientOptions(learner.address, env.name, num_envs=8), env)
    worker = Worker('client', lambda: run_all([client]))
    until(lambda: both_step(learner, 10) or not worker.alive)
    client.stop(signal.SIGTERM)
    worker.join(60)
    assert not learner.server.counts['malformed']


def test_its_groups_are_as_many_as_the_learner_advises(tmp_path: Path) -> None:
  with Learner(slots=8, on_cores=True) as learner:
    with Envs(learner.address, tmp_path / 'log', '--num-envs', '4'):
      until(lambda: learner.steps > 40)
      (peer,) = learner.server.peers
      assert [group.size for group in peer.state.groups.values()] == [4]
    assert_whole(lives(learner.arrivals))


def test_ctrl_c_is_130(tmp_path: Path) -> None:
  with Learner() as learner, Envs(learner.address, tmp_path / 'log') as envs:
    until(lambda: learner.steps > 10)
    envs.signal(signal.SIGINT)
    assert envs.wait() == 130


def all_step(learner: Learner, dropped: int) -> bool:
  """So many clients are gone, and all slots are those of others that step."""
  groups = [g for p in list(learner.server.peers) for g in list(p.state.groups.values())]
  gone = learner.server.counts['dropped'] == dropped
  return gone and not learner.pools[0].free and all(g.seq for g in groups)


@pytest.mark.parametrize('count', [2, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_clients_lose_and_duplicate_nothing(count: int, tmp_path: Path) -> None:
  """At random moments. New clients come in their place at once."""
  moments = random.Random(0)
  with Learner(slots=4, peer_timeout=600.0, deadline=600.0, max_wait=0.001) as learner:
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
    # Of the clients. A process of another test may connect to a port that was its own before.
    assert not [line for line in learner.said if ', it sent ' in line], learner.said
    assert sorted(learner.pools[0].free) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_frozen_client_is_dropped_and_comes_back(tmp_path: Path) -> None:
  with Learner(slots=2, peer_timeout=1.0) as learner:
    with Envs(learner.address, tmp_path / 'log', '--num-envs', '2') as envs:
      until(lambda: learner.steps > 50)
      envs.signal(signal.SIGSTOP)
      learner.says('silent')
      learner.says('--connect')
      before = learner.steps
      envs.signal(signal.SIGCONT)
      until(lambda: learner.steps > before + 50)
      envs.says('anew')
    found = lives(learner.arrivals)
    assert_whole(found)
    assert {run for _, _, run in found} == {0, 1}


def test_a_client_outlives_learners_and_ends_with_the_last(tmp_path: Path) -> None:
  with Learner() as learner:
    address = learner.address
    envs = Envs(address, tmp_path / 'log', '--num-envs', '2')
    until(lambda: learner.steps > 20)
  with envs:
    envs.says('is over')
    with Learner(address=address) as again:
      until(lambda: again.steps > 20)
      assert_whole(lives(again.arrivals))
      again.server.network.finish()
    assert envs.wait() == 0


def test_the_end_and_the_cut_may_come_at_once(tmp_path: Path) -> None:
  learner = bare.Accepting(environment_messages.OF_CLIENTS)
  args = ['--num-envs', '2', '--groups', '1']
  with Envs(learner.address, tmp_path / 'log', *args) as envs:
    end = learner.accept(60)
    told = end.expect(session_messages.HELLO, 60)[0][0]
    end.say(session_messages.WELCOME, dict(largest_group=2, silence=60.0, env=told['env']))
    end.expect(environment_messages.ENTER)  # and it has no more to say
    envs.signal(signal.SIGSTOP)
    end.say(session_messages.END, True, 'all is done')
    end.close()
    learner.close()
    envs.signal(signal.SIGCONT)
    assert envs.wait() == 0
    assert 'all is done' in envs.output and 'anew' not in envs.output


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
  learner = Learner(deadline=2.0)
  with learner, Envs(learner.address, tmp_path / 'log', *args, env=wrong) as envs:
    envs.says(' 2 s')
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
      envs.says(f' {one}: ')
      learner.says(f' {one}: ')
      until(lambda: learner.steps > 20)
    with Envs(learner.address, tmp_path / 'one', env=one) as envs:
      envs.says('joined')
      until(lambda: learner.server.counts['sessions'] == 2)
    assert f' {one}: ' not in envs.output


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
    assert 'ZeroDivisionError' in envs.output
    learner.says('failed')


def test_refused_with_both_sides_printed_at_both_ends(tmp_path: Path) -> None:
  with Learner(spec(shape=(7,))) as learner:
    with Envs(learner.address, tmp_path / 'log') as envs:
      assert envs.wait() == 2
      (line,) = [x for x in envs.output.splitlines() if 'observation: ' in x]
      assert '[7]' in line and '[4]' in line
    learner.says(line.strip())


def test_nobody_there_is_told_and_can_be_given_up(tmp_path: Path) -> None:
  with Learner() as learner:
    address = learner.address
  with Envs(address, tmp_path / 'log', '--give-up-after', '1.5') as envs:
    assert envs.wait() == 1
    assert address in envs.output.splitlines()[-1]


def test_a_learner_that_is_getting_ready_is_there() -> None:
  """To give up is for where nobody is: not while it says that it is to be waited for."""
  learner = bare.Accepting(environment_messages.OF_CLIENTS)
  client = EnvironmentClient(ClientOptions(learner.address, 'test:spec', give_up=2.5), spec())
  thread = threading.Thread(target=lambda: raised.append(ended(client)), daemon=True)
  raised: list[Any] = []
  thread.start()
  with learner.accept() as end:
    for _ in range(4):
      end.expect(session_messages.HELLO)
      end.say(session_messages.WAIT, 'the learner is getting ready')
    assert thread.is_alive()
  learner.close()
  thread.join(20)
  assert learner.address in str(raised[0])


def ended(client: EnvironmentClient, kind: type[BaseException] = TimeoutError) -> BaseException:
  with pytest.raises(kind) as error:
    run_all([client])
  return error.value


def test_each_learner_process_has_its_part() -> None:
  addresses = 'unix:/a,unix:/b,unix:/c'
  three = ClientOptions(addresses, 'test:spec', num_envs=8, workers=7, seed=5).parts()
  assert [(o.connect, o.num_envs, o.workers) for o in three] == [
    ('unix:/a', 3, 2), ('unix:/b', 3, 2), ('unix:/c', 2, 2)
  ]  # fmt: skip
  drawn = {tuple(np.random.SeedSequence([o.seed, 0]).generate_state(2)) for o in three}
  assert len(drawn) == 3
  for connect, part in ((addresses, '3 .*--connect'), ('unix:/a,b', "--connect .* 'b'")):
    with pytest.raises(ValueError, match=part):
      ClientOptions(connect, 'test:spec', num_envs=2)


def test_what_one_client_fails_with_ends_all(tmp_path: Path) -> None:
  """One of two learners refuses its environments; the other hears why they leave."""
  with Learner() as one, Learner(spec(shape=(7,))) as other:
    log = tmp_path / 'log'
    with Envs(f'{one.address},{other.address}', log, '--num-envs', '4') as envs:
      assert envs.wait() == 2
      assert 'observation: ' in envs.output
    one.says('failed')


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
def test_bad_usage_is_2(args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit) as end:
    cli.main(['envs', *args])
  assert end.value.code == 2
  assert capfd.readouterr().err.startswith('podrace: ')


def test_a_start_of_no_or_a_begun_group_is_refused() -> None:
  client = EnvironmentClient(ClientOptions('tcp://127.0.0.1:9', 'test:spec'), spec())
  args = PoolArgs(1, 1, np.zeros(1, np.uint32), 1, 1.0)
  begun = GroupThread(0, 1, spec(), args, lambda *args: None, lambda *args: None)
  begun.worker = Worker('begun', int)
  client.groups = [begun]
  for index in (0, 1):
    with pytest.raises(environment_messages.WireError, match=f'group {index}'):
      client.handle(environment_messages.START, [index], [])


def test_actions_that_nobody_has_asked_for_are_none() -> None:
  client = EnvironmentClient(ClientOptions('tcp://127.0.0.1:9', 'test:spec'), spec())
  args = PoolArgs(1, 1, np.zeros(1, np.uint32), 1, 1.0)
  group = GroupThread(0, 1, spec(), args, lambda *args: None, lambda *args: None)
  client.groups = [group]
  action = memoryview(bytes(4))
  for fields, data in (((1, 0), action), ((0, 1), action), ((0, 0), action[:3])):
    with pytest.raises(environment_messages.WireError, match='actions'):
      client.handle(environment_messages.ACTION, fields, [data])
  client.handle(environment_messages.ACTION, (0, 0), [action])
  assert group.seq == 1
  with pytest.raises(environment_messages.WireError, match='asked'):  # it steps
    client.handle(environment_messages.ACTION, (0, 1), [action])


def test_an_environment_that_hangs_when_the_run_ends_is_a_failure(monkeypatch: Patch) -> None:
  """Within END_SECONDS, not after the deadline of a step."""
  monkeypatch.setattr(environment_client, 'END_SECONDS', 0.2)
  steps, done = threading.Event(), threading.Event()

  def hang(self: Any) -> Any:
    steps.set()
    done.wait(120)

  pool = type('Pool', (), dict(
    watches_itself=False, reset=lambda self: None, recv=hang, close=lambda self: None
  ))  # fmt: skip
  kind = dataclasses.replace(spec(), make=lambda args: pool())
  learner = bare.Accepting(environment_messages.OF_CLIENTS)
  client = EnvironmentClient(ClientOptions(learner.address, 'test:spec', num_envs=1), kind)
  with contextlib.ExitStack() as stack:
    stack.callback(done.set)
    stack.callback(learner.close)
    raised: list[Any] = []
    thread = threading.Thread(target=lambda: raised.append(failed(client)), daemon=True)
    thread.start()
    end = stack.enter_context(learner.welcome(largest_group=4, env='x'))
    end.expect(environment_messages.ENTER)
    end.say(environment_messages.START, 0)
    assert steps.wait(60)
    end.say(session_messages.END, True, 'the run is complete')
    thread.join(30)
    assert raised


def failed(client: EnvironmentClient) -> BaseException:
  with pytest.raises(GroupFailed) as error:
    run_all([client])
  return error.value


def test_it_imports_no_jax() -> None:
  """Nor anything that is heavy: what is imported is counted, with the trial of somebody's own environment."""
  code = (
    'import sys; import podrace.distributed.environments.client, podrace.distributed.net.dashboard, podrace.envs.host.ale\n'
    'podrace.distributed.environments.client.make_spec("gymnasium:CartPole-v1")\n'
    'wrong = {"jax", "jaxlib", "flax", "optax", "orbax", "tyro", "rich"} & set(sys.modules)\n'
    'assert not wrong, wrong\n'
    'print(len([m for m in sys.modules if m.startswith("podrace")]))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) <= 58


@pytest.mark.parametrize('wrong', [
  {'largest_group': 0}, {'largest_group': -3}, {'largest_group': 2.5}, {'largest_group': True}, {'env': None},
  {'groups': 0}, {'groups': -1}, {'groups': 1.0}, {'groups': None}, {'groups': True},
])  # fmt: skip
def test_a_welcome_that_is_none(wrong: dict[str, Any]) -> None:
  """A learner that says nonsense is lost; it ends no environments' process."""
  client = EnvironmentClient(ClientOptions('tcp://127.0.0.1:9', 'test:spec'), spec())
  with pytest.raises(environment_messages.WireError, match='welcome'):
    client.joined({'largest_group': 4, 'silence': 1.0, 'env': 'x', **wrong})
  assert not client.groups


@pytest.mark.parametrize(
  'case', slow_after(2, 'silent', 'other keys', 'nobody', 'not listed', 'no keys')
)
def test_what_is_wrong_is_said(case: str, tmp_path: Path, monkeypatch: Patch) -> None:
  """By `podrace envs`, and by `podrace top` likewise."""
  seconds = 5.0 if case == 'not listed' else 1.0  # it has to connect before it is refused
  monkeypatch.setattr(dashboard, 'ANSWER_SECONDS', seconds)
  keys, other = tmp_path / 'keys', tmp_path / 'other'
  net_keys.new_keys(keys)
  if case == 'not listed':
    net_keys.new_client(keys, other)
    (keys / net_keys.ALLOWED).write_text('')
  else:
    net_keys.new_keys(other)
  own = None if case in ('nobody', 'no keys', 'silent') else other
  reason = {
    'nobody': connecting.NOBODY, 'not listed': 'allowed_clients', 'silent': connecting.SAYS_NOTHING,
    'no keys': '--keys', 'other keys': 'certificate',
  }[case]  # fmt: skip
  with contextlib.ExitStack() as stack:
    address = 'tcp://127.0.0.1:9'
    if case == 'silent':
      silent = bare.Accepting(environment_messages.OF_CLIENTS)
      stack.callback(silent.close)
      address = silent.address
    elif case != 'nobody':
      address = stack.enter_context(Learner(keys=keys)).address
    client = EnvironmentClient(
      ClientOptions(address, 'test:spec', keys=own, give_up=seconds), spec()
    )
    kind = Refused if case in ('other keys', 'no keys') else TimeoutError
    assert reason in str(ended(client, kind))
    asker = Asker(address, own, False)
    with pytest.raises(kind) as error:
      asker.ask()
    asker.close()
    assert reason in str(error.value)


@pytest.mark.parametrize(
  ('num_envs', 'groups', 'largest', 'best', 'sizes'),
  [
    (64, 0, 64, 2, [32, 32]), (64, 0, 16, 2, [16] * 4), (64, 0, 20, 2, [16] * 4), (1, 0, 8, 2, [1]),
    (7, 3, 8, 2, [3, 2, 2]), (5, 1, 8, 2, [5]),
    (64, 0, 64, 1, [64]), (64, 0, 20, 1, [16] * 4), (64, 2, 64, 1, [32, 32]), (3, 0, 8, 9, [1, 1, 1]),
  ],
)  # fmt: skip
def test_group_sizes(num_envs: int, groups: int, largest: int, best: int, sizes: list[int]) -> None:
  assert group_sizes(num_envs, groups, largest, best) == sizes


@pytest.mark.parametrize(
  ('num_envs', 'groups', 'address'),
  [(4, 5, 'unix:/x'), (4, 3, 'unix:/x,unix:/y'), (1000, 257, 'unix:/x')],
)
def test_more_groups_than_there_can_be_are_refused(
  num_envs: int, groups: int, address: str
) -> None:
  with pytest.raises(ValueError, match=f'--groups {groups}'):
    ClientOptions(address, 'test:spec', num_envs, groups=groups)


def test_group_sizes_that_cannot_be() -> None:
  for sizes, part in (((64, 2, 16, 2), '--groups 2'), ((1000, 0, 1, 2), '256 groups of 1')):
    with pytest.raises(ValueError, match=part):
      group_sizes(*sizes)
