"""Reanalysing processes: they refresh the targets in replay and nothing else; they come, go, and end."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import until
from label_run import Publishing
from processes import as_users_have_it, cache, checkpoints
from test_apex import Places, places
from test_muzero import quick, recording, window_of

from podrace import cli, errors, tables
from podrace.agents import search
from podrace.agents.muzero import MuZero
from podrace.agents.search import MuZeroParams
from podrace.architectures.sebulba import example_trajectory
from podrace.distributed import acting as acting_process
from podrace.distributed import learner_client, parameters, reanalyse, replay, run_identity, stage
from podrace.distributed.net import link
from podrace.distributed.replay.server import ReplayServer
from podrace.distributed.run_identity import to_leaves
from podrace.envs.host import base as host
from podrace.hooks import memory
from podrace.networks import LearnedModel, merge_time, split_time
from podrace.replay import Buffer
from podrace.replay.layout import Layout
from podrace.replay.refresh import Refresh
from podrace.settings.config import Config
from podrace.settings.resolved import resolve
from podrace.types import Trajectory

TINY = [
  '--agent.network.hidden', '8', '--agent.network.latent', '4', '--agent.network.dynamics-hidden', '8',
  '--agent.network.head-hidden', '8', '--agent.network.bins', '5', '--agent.simulations', '2',
  '--agent.unroll', '1', '--agent.n-step', '2', '--agent.buffer.batch-size', '16',
  '--agent.buffer.min-size', '128', '--agent.buffer.capacity', '2048', '--num-envs', '8',
]  # fmt: skip


def tiny(**changes: Any) -> Config:
  network = LearnedModel(
    hidden=(8,), latent=4, dynamics_hidden=(8,), head_hidden=(8,), bins=5, v_min=-2.0, v_max=2.0
  )
  buffer = Buffer(capacity=512, batch_size=16, min_size=64, samples_per_insert=4.0)  # uniform
  agent = MuZero(network, buffer, simulations=2, unroll=1, n_step=2)
  return Config(
    dataclasses.replace(agent, **changes), env='podrace:catch', architecture='sebulba', num_envs=8,
    unroll_length=4, lag='async', replay='service', devices=1, actor_threads=1,
  )  # fmt: skip


def bound(config: Config) -> Any:
  return resolve(config).agent


# --- what an agent refreshes ------------------------------------------------------------------------


def same(a: Any, b: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


def without_plan(window: Trajectory) -> Any:
  return window._replace(outputs=window.outputs._replace(extras=window.outputs.extras.sample))


def test_targets_are_those_of_searches_with_the_given_parameters() -> None:
  agent = recording(simulations=3, reanalyse_simulations=5)
  window, key = window_of(agent), jax.random.key(2)
  init = jax.jit(agent.network.init)
  params, other = (MuZeroParams(init(jax.random.key(i)), jnp.int32(42)) for i in (0, 1))
  refresh = jax.jit(agent.refresh, compiler_options=quick)
  fresh = jax.device_get(refresh(params, window, key))
  plan, old = fresh.outputs.extras.plan, window.outputs.extras.plan
  states = jnp.asarray(window.timesteps.observation[: agent.positions])
  hidden = merge_time(jnp.tanh(states @ params.network['r']))
  search_with = jax.jit(
    lambda p, h, k, n: search.plan(agent.search_settings, p, h, merge_time(states), k, n)[1],
    static_argnums=3, compiler_options=quick,
  )  # fmt: skip
  for given, n, equal in ((params, 5, True), (params, 3, False), (other, 5, False)):
    expected = split_time(search_with(given, hidden, key, n), agent.positions)
    close = np.allclose(plan.weights, expected.weights, atol=1e-5)
    assert close == np.allclose(plan.value, expected.value, atol=1e-5) == equal
  assert (plan.steps == 42).all() and plan.reanalysed.all() and plan.reanalysed.dtype == bool
  assert not np.allclose(plan.value, old.value) and not np.asarray(old.reanalysed).any()
  same(without_plan(fresh), without_plan(window))


@pytest.mark.slow
def test_states_behind_a_burn_in_are_refreshed() -> None:
  """A recurrent state comes from the window's own, through the burn-in."""
  config = tiny(
    network=dataclasses.replace(tiny().agent.network, core='gru'), sequence=4, burn_in=2
  )
  agent = bound(config)
  rng, length, batch = np.random.default_rng(0), agent.burn_in + agent.positions, 3
  spec = host.make(config.env)
  example = example_trajectory(agent, spec, batch, length)
  window = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 2, x.shape).astype(x.dtype)), example)
  within = jnp.ones_like(window.timesteps.step_type)  # no state is forgotten
  window = window._replace(timesteps=window.timesteps._replace(step_type=within))
  network = jax.tree.map(  # a new one values all states alike
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype),
    jax.jit(agent.init)(jax.random.key(0)).params.network,
  )
  params, key = MuZeroParams(network, jnp.int32(9)), jax.random.key(1)
  refresh = jax.jit(agent.refresh, compiler_options=quick)
  plan, old = refresh(params, window, key).outputs.extras.plan, window.outputs.extras.plan
  same(*(jax.tree.map(lambda x: x[:2], p) for p in (plan, old)))
  assert (np.asarray(plan.steps[2:]) == 9).all() and np.asarray(plan.reanalysed[2:]).all()
  steps = jax.tree.map(lambda x: x[:length], window.timesteps)

  def searched(params: MuZeroParams) -> search.Plan:
    hidden = agent.network.represent(params.network, window.agent_state, steps)[0]
    behind = merge_time(jax.tree.map(lambda x: x[2:], hidden))
    return search.plan(
      agent.search_settings, params, behind, merge_time(steps.observation[2:]), key, 2
    )[1]

  expected = jax.jit(searched, compiler_options=quick)(params)
  np.testing.assert_allclose(merge_time(plan.value[2:]), expected.value, atol=1e-4)
  moved = window._replace(agent_state=jax.tree.map(lambda x: x + 1, window.agent_state))
  assert not np.allclose(refresh(params, moved, key).outputs.extras.plan.value, plan.value)


def test_what_is_written_are_the_columns_that_an_agent_changes() -> None:
  config = tiny()
  agent, spec = bound(config), host.make(config.env)
  windows = memory(agent, spec, config.num_envs, config.unroll_length).windows
  assert windows is not None
  layout = Layout(windows, example_trajectory(agent, spec, config.num_envs, config.unroll_length))
  data = {k: x for k, x in layout.batch().items() if k != 'weight'}
  params = jax.eval_shape(lambda key: agent.init(key).params, jax.random.key(0))
  found = jax.eval_shape(Refresh(agent, layout), params, data, jax.random.key(0))
  names = ('weights', 'value', 'steps', 'reanalysed')
  assert found.keys() == {f'extras/plan/{name}' for name in names}
  for name, x in found.items():
    assert (x.shape, x.dtype) == (data[name].shape, data[name].dtype)


def test_each_window_gets_its_own_targets() -> None:
  with ReplayServer('tcp://127.0.0.1:*') as server, replay.connect(server.address) as client:
    table = client.table(
      'it', sampler=tables.uniform(), remover=tables.fifo(), rate_limiter=tables.min_size(1),
      max_size=100,
    )  # fmt: skip
    writer, keys = client.writer(history=3), []
    for i in range(4):
      for t in range(3):
        writer.append({'x': np.int32(10 * i + t), 'y': np.float32(0)})
      keys.append(writer.create_item(table, 1.0, num_steps=3))
    writer.close(timeout=30)
    wanted = np.arange(12, dtype=np.float32).reshape(4, 3)
    targets = reanalyse.Targets(client, table, 3)
    targets.write(stage.Batch(np.array(keys), {}), {'y': jnp.asarray(wanted)}, 0)
    until(lambda: contents(server.tables['it'])[keys[3]]['y'].any())
    found = contents(server.tables['it'])
    for i, key in enumerate(keys):
      np.testing.assert_array_equal(found[key]['y'], wanted[i])
      np.testing.assert_array_equal(found[key]['x'], 10 * i + np.arange(3))


# --- one process, with the service and the parameters in this one -------------------------------------


class Learner(Publishing):
  """Publishes parameters as a learner does."""

  def __init__(self, folder: Path) -> None:
    super().__init__(folder, tiny())
    self._init = jax.jit(lambda key, steps: self.agent.init(key).params._replace(steps=steps))

  def params(self, version: int) -> Any:
    """Parameters that have had as many steps as their version."""
    return self._init(jax.random.key(version), np.int32(version))

  def reanalyse(self, **options: Any) -> None:
    self.start_stage(reanalyse.DUTY, **options)


def contents(table: tables.Table) -> dict[int, dict[str, np.ndarray]]:
  """All windows of a table in this process, by key."""
  with table.desk.running:
    items = [item for item in table.contents.items if item is not None]
  found = tables.items.Draws(items, [tuple(np.zeros(len(items)) for _ in range(4))])
  data = found.read(table.store, items[0].signature.structure).data
  return {item.key: {k: x[i] for k, x in data.items()} for i, item in enumerate(items)}


def of_plan(name: str) -> bool:
  return name.startswith('extras/plan/')


def test_it_refreshes_what_is_in_replay_and_nothing_else(
  tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(link, 'METRICS_SECONDS', 0.1)
  caplog.set_level(logging.INFO)
  learner = Learner(tmp_path)
  with learner.publisher, ReplayServer(learner.addresses.replay[0]) as server:
    learner.publish(3)
    learner.act()
    until(lambda: 'windows' in server.tables)
    table = server.tables['windows']
    until(lambda: table.info().waiting_inserts)  # the limiter holds back all that is acted
    before, counts = contents(table), dataclasses.replace(table.contents.counts)
    assert all((x['extras/plan/steps'] == 3).all() for x in before.values())
    assert not any(x['extras/plan/reanalysed'].any() for x in before.values())
    learner.publish(7)
    learner.reanalyse(batch_size=32)
    until(lambda: len(learner.publisher.clients('reanalyse')) == 1)
    assert len(learner.publisher.clients('act')) == 1

    def fresh(steps: int) -> bool:
      found = contents(table).values()
      return all((x['extras/plan/steps'] == steps).all() for x in found)

    until(lambda: fresh(7))
    after = contents(table)
    assert after.keys() == before.keys() and table.contents.counts == counts
    for key, window in after.items():
      assert window['extras/plan/reanalysed'].all()
      np.testing.assert_allclose(window['extras/plan/weights'].sum(-1), 1, rtol=1e-5)
      for name in window:
        equal = np.array_equal(window[name], before[key][name])
        assert equal or of_plan(name), name
    assert any(
      (after[k]['extras/plan/value'] != before[k]['extras/plan/value']).any() for k in after
    )
    learner.publish(9)
    until(lambda: fresh(9))  # with the newest
    until(lambda: learner.publisher.clients('reanalyse')[0].get('windows_per_s', 0) > 0)
    (sent,) = learner.publisher.clients('reanalyse')
    assert sent['searches_per_s'] >= sent['windows_per_s'] and sent['resident_mb'] > 50
    assert 0 <= sent['staleness_s'] < 60
    (sent,) = learner.publisher.clients('act')
    assert sent.keys() == {
      'steps_per_s', 'write_share', 'env_restarts', 'dropped_steps', 'staleness_s', 'resident_mb',
    }  # fmt: skip
    learner.end(10, 2)
  (told,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith('reanalysed')]
  assert 'windows/s' in told and 'searches/s' in told


@pytest.mark.slow
def test_it_waits_for_windows_and_for_a_service(tmp_path: Path) -> None:
  learner = Learner(tmp_path)
  address = learner.addresses.replay[0]
  with learner.publisher:
    learner.publish(3)
    learner.reanalyse()
    for version in (3, 4):  # the second is another service, whose table is empty
      with ReplayServer(address) as server:
        until(lambda server=server: 'windows' in server.tables)
        table = server.tables['windows']
        if version == 3:
          until(lambda table=table: table.info().waiting_samplers)
          learner.act()
        else:
          learner.publish(4)
        until(lambda table=table: len(table) and any(
          x['extras/plan/reanalysed'].any() for x in contents(table).values()
        ))  # fmt: skip
    with ReplayServer(address):
      learner.end(5, 2)


@pytest.mark.slow
def test_it_is_of_the_learners_run(tmp_path: Path) -> None:
  learner = Learner(tmp_path)
  with learner.publisher, ReplayServer(learner.addresses.replay[0]) as server:
    learner.publish(1, run='one-1')
    learner.reanalyse()
    until(lambda: 'windows' in server.tables)
    learner.publish(2, run='two-2')
    learner.threads[0].join(120)
    assert all(name in str(learner.ended) for name in ("'two-2'", "'one-1'"))
    config = dataclasses.replace(learner.config, num_envs=16)
    other = stage.Stage(reanalyse.DUTY, resolve(config), stage.Options(learner.addresses))
    with pytest.raises(ValueError, match=r'--num-envs: .* 8.* 16'):
      other.run()


# --- processes --------------------------------------------------------------------------------------


def start(places: Places, command: str, *args: str) -> Any:
  """One of the processes that need a preset."""
  where = {
    'train': ['--listen', places.parameters, '--run-dir', str(places.run_dir)],
    'act': ['--params', places.parameters],
    'reanalyse': ['--params', places.parameters],
  }
  return places.start(
    command, 'muzero-catch', *TINY, '--connect-replay', places.replay, *where[command], *args
  )


LEARNER = [
  '--architecture', 'sebulba', '--lag', 'async', '--replay', 'service', '--log-every', '64',
]  # fmt: skip


def reanalysed(places: Places) -> float:
  """The newest share."""
  return (places.told() or [{}])[-1].get('reanalysed') or 0.0  # None before anything is learned


@pytest.mark.slow
def test_a_run_learns_from_fresh_targets(places: Places) -> None:
  """Four commands, until the run is complete."""
  server, learner = places.serve(), start(places, 'train', *LEARNER, '--total-steps', '3_200')
  refresher = start(places, 'reanalyse')
  refresher.says(' 16 windows')
  assert os.sched_getscheduler(refresher.process.pid) == os.SCHED_IDLE
  actor = start(places, 'act')
  assert [learner.wait(), actor.wait(), refresher.wait()] == [0, 0, 0], learner.output
  told = places.told()
  assert 0 < told[-1]['reanalysed'] <= 1 and told[-1]['target_age'] >= 0
  assert told[-1]['acting_processes'] == told[-1]['reanalysing_processes'] == 1
  assert 'windows/s' in refresher.output and 'searches/s' in refresher.output
  server.signal(signal.SIGTERM)
  assert server.wait() == 143


@pytest.mark.slow
def test_reanalysing_processes_come_and_go(places: Places) -> None:
  """One is killed, one is told to end, one stays until the run is complete, while the learner comes and goes."""
  server = places.serve()
  learner = start(places, 'train', *LEARNER, '--total-steps', '1_000_000')
  actor = start(places, 'act')
  places.step_from(256)
  assert not any(x['reanalysed'] for x in places.told())
  first = start(places, 'reanalyse', '--batch-size', '8')
  until(lambda: reanalysed(places))
  assert places.told()[-1]['acting_processes'] == places.told()[-1]['reanalysing_processes'] == 1
  first.kill()
  second, third = start(places, 'reanalyse'), start(places, 'reanalyse', '--quiet')
  second.says(' 16 windows')
  places.step_from(128)
  second.signal(signal.SIGTERM)
  assert second.wait() == 143, second.output
  until(lambda: places.told()[-1]['reanalysing_processes'] == 1)
  until(lambda: reanalysed(places))
  learner.signal(signal.SIGTERM)
  assert learner.wait() == 143, learner.output
  steps = str(checkpoints(places.run_dir)[-1] + 640)
  learner = start(places, 'train', *LEARNER, '--total-steps', steps, '--override')
  assert [learner.wait(), actor.wait(), third.wait()] == [0, 0, 0], learner.output
  assert places.told()[-1]['reanalysed'] > 0
  server.signal(signal.SIGTERM)
  assert server.wait() == 143


@pytest.fixture(autouse=True)
def goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
  """This process does not give way, which would be for good."""
  monkeypatch.setattr(stage, 'give_way', lambda: None)


# --- bad input --------------------------------------------------------------------------------------

ENDS = ['--connect-replay', 'tcp://127.0.0.1:1', '--params', 'tcp://127.0.0.1:2']


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['muzero-catch'], '--connect-replay'),
    (['muzero-catch', *ENDS[:2]], '--params'),
    (['catch', *ENDS], 'impala'),
    (['dqn-pong', *ENDS], 'dqn'),
    (['muzero-catch', *ENDS, '--agent.simulations', '0'], 'simulations 0'),
    (['muzero-catch', *ENDS, '--agent.simulations', '0', '--agent.reanalyse', '1'], 'simulations 0'),
    (['muzero-catch', *ENDS, '--batch-size', '0'], '--batch-size'),
    (['muzero-catch', *ENDS, '--agent.buffer.capacity', '80_000', '--agent.buffer.batch-size',
      '70_000'], '47662'),
    (['muzero-catch', *ENDS, '--batch-size', '47663'], '47662'),  # 11 columns
    (['muzero-catch', *ENDS, '--max-staleness', '0'], '--max-staleness'),
    (['muzero-catch', *ENDS, '--total-steps', '9'], '--total-steps'),
    (['muzero-catch', *ENDS, '--actor-threads', '2'], '--actor-threads'),
    (['muzero-catch', *ENDS, '--lag', '1'], '--lag async'),
    (['muzero-catch', '--connect-replay', 'foo', *ENDS[2:]], '--connect-replay'),
    (['muzero-catch', *ENDS[:3], 'tcp://10.0.0.1:1'], '--keys'),
    (['muzero-cach', *ENDS], "'muzero-cach'"),
  ],
)  # fmt: skip
def test_bad_usage_is_2(args: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit) as end:
    cli.main(['reanalyse', *args, '--give-up-after', '0.1'])
  said = capfd.readouterr().err
  assert end.value.code == 2 and message in said and len(said.strip().splitlines()) == 1


def test_it_gives_up_if_asked_to(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
  ends = ['--connect-replay', f'unix:{tmp_path}/a', '--params', f'unix:{tmp_path}/b']
  with pytest.raises(SystemExit) as end:
    cli.main(['reanalyse', 'muzero-catch', *TINY, *ends, '--give-up-after', '0.1'])
  assert end.value.code == 1
  assert f'unix:{tmp_path}/b' in capfd.readouterr().err
