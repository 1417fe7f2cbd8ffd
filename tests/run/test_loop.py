"""What a run leaves in its directory, and what it says when it can't go on."""
# ruff: noqa: F401 (fixtures of processes)

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import until
from processes import StopAt, as_users_have_it, cache, checkpoints, every_file, lines, summary
from shared_programs import shared_programs
from shorthand import Capture, Patch, TempPaths, slow_after
from test_runs import called

from podrace import envs, errors
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.architectures import hashes
from podrace.architectures.anakin import AnakinDriver
from podrace.errors import UsageError
from podrace.networks import ActorCritic, QNetwork
from podrace.replay import Buffer
from podrace.run import compatibility, loop, metrics, opening, save_and_resume, sinks, updates
from podrace.run.build import build, describe_devices
from podrace.run.checkpoint import stored
from podrace.run.compatibility import Fit, random_settings
from podrace.run.evaluate import evaluate
from podrace.run.summary import final_return
from podrace.settings.agents import bind
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import from_json, to_json
from podrace.system import files, signals

SMALL = ActorCritic(hidden=(16,), initializer='lecun')
CONFIG = Config(
  agent=Impala(network=SMALL), num_envs=4, unroll_length=8, total_steps=3200, devices=1,
  log_every=320, checkpoint_every=1600,
)  # fmt: skip


@pytest.fixture(scope='module', autouse=True)
def no_early_checkpoint() -> Iterator[None]:
  """Which would come by the clock; those of the steps are counted here."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(updates, 'FIRST_CHECKPOINT_SECONDS', math.inf)
    yield


def change(config: Config = CONFIG, **changes: Any) -> Config:
  return dataclasses.replace(config, **changes)


@pytest.fixture(scope='module')
def finished(tmp_path_factory: TempPaths) -> Path:
  run_dir = tmp_path_factory.mktemp('finished') / 'run'
  loop.train(CONFIG, run_dir, quiet=True)
  return run_dir


@pytest.fixture(scope='module')
def two_seeds(tmp_path_factory: TempPaths) -> Path:
  run_dir = tmp_path_factory.mktemp('seeds') / 'run'
  loop.train(change(seeds=2), run_dir, quiet=True)
  return run_dir


# --- the run directory --------------------------------------------------------------------------


def test_what_a_run_writes_whole_outlives_a_power_cut(tmp_path: Path, monkeypatch: Patch) -> None:
  synced: list[str] = []

  def fsync(descriptor: int) -> None:
    path = Path(os.readlink(f'/proc/self/fd/{descriptor}'))
    there = (tmp_path / 'x.json').exists()
    synced.append(f'{path.relative_to(tmp_path)} {there}')

  monkeypatch.setattr(os, 'fsync', fsync)
  files.write_json(tmp_path / 'x.json', {'a': 1})
  assert synced == ['x.json.new False', '. True']


def test_run_directory(finished: Path) -> None:
  assert {p.name for p in finished.iterdir()} == {
    'config.json', 'metrics.jsonl', 'checkpoints', 'summary.json', 'lock'
  }  # fmt: skip
  assert from_json(json.loads((finished / 'config.json').read_text())) == CONFIG
  assert checkpoints(finished) == [1600, 3200]


def test_metrics_lines(finished: Path) -> None:
  found = lines(finished)
  assert [line['step'] for line in found] == list(range(320, 3201, 320))
  for line in found:
    assert line['wall_s'] > 0 and line['steps_per_s'] > 0
    assert line['episodes'] > 0 and -1 <= line['episode_return'] <= 1
    assert line['episode_length'] == 9
    assert line['episode_return_std'] == pytest.approx(
      math.sqrt(1 - line['episode_return'] ** 2), abs=1e-5
    )
    assert {'loss', 'entropy'} < line.keys()
  # An episode of Catch is 9 steps and one that resets: every one of them is counted once.
  assert sum(line['episodes'] for line in found) == CONFIG.num_envs * ((3200 // 4 + 1) // 10)


def test_summary(finished: Path) -> None:
  found = summary(finished)
  assert found['step'] == 3200
  assert found['steps_per_s'] > 0 and found['compile_s'] > 0
  tail = [line for line in lines(finished) if line['step'] > 0.9 * 3200]
  episodes = sum(line['episodes'] for line in tail)
  total = sum(line['episode_return'] * line['episodes'] for line in tail)
  assert found['episode_return'] == pytest.approx(total / episodes)
  assert len(found['params_sha256']) == 64


@pytest.mark.parametrize(
  'settings, expected',
  [
    (dict(architecture='anakin', devices=2), '2 device(s)'),
    (dict(devices=1), '1 device(s)'),
    (dict(actor_devices='0', learner_devices='1'), '1 acting and 1 learning device(s)'),
    (dict(actor_devices='0', devices=3), '1 acting and 2 learning device(s)'),
    (dict(replay='service', devices=2), '2 learning device(s)'),
  ],
)
def test_acting_and_learning_devices_are_named(settings: dict[str, Any], expected: str) -> None:
  config = Config(Impala(), **{'architecture': 'sebulba', **settings})
  mesh = SimpleNamespace(size=config.devices)
  assert describe_devices(config, mesh) == expected


def test_the_final_return_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
  path = tmp_path / 'metrics.jsonl'
  told = [(10, 7.0, 1), (95, None, 3), (98, 2.0, 1), (100, 5.0, 2)]
  text = [dict(step=s, episode_return=r, episodes=n) for s, r, n in told]
  path.write_text(''.join(json.dumps(line) + '\n' for line in text))
  assert final_return(path) == {'episode_return': 4.0, 'episodes': 3}
  seeds = dict(episode_return_by_seed=[2.0, None], episodes_by_seed=[4, 0])
  path.write_text(json.dumps({**text[0], **seeds}) + '\n')
  assert final_return(path)['episode_return_by_seed'] == [2.0, None]
  path.write_text(json.dumps(text[1]) + '\n')
  assert final_return(path) == {'episode_return': None, 'episodes': 0}
  seeds = dict(episode_return_by_seed=[None, None], episodes_by_seed=[0, 0])
  path.write_text(json.dumps({**text[1], 'episodes': 0, **seeds}) + '\n')
  assert final_return(path)['episode_return_by_seed'] == [None, None]


def test_a_summary_that_is_none_is_refused(tmp_path: Path) -> None:
  (tmp_path / 'summary.json').write_text('{"step": 1}')
  with pytest.raises(UsageError, match=r'summary\.json'):
    loop.train(CONFIG, tmp_path, quiet=True)


@pytest.mark.parametrize('damaged', slow_after(2, b'', b'{"step": 32', b'\0' * 40, b'\xff\xfe'))
def test_a_damaged_summary_is_written_again(
  damaged: bytes, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
  run_dir = tmp_path / 'run'
  shutil.copytree(finished, run_dir)
  (run_dir / 'summary.json').write_bytes(damaged)
  found = loop.train(CONFIG, run_dir)
  assert found['params_sha256'] == summary(finished)['params_sha256']
  assert summary(run_dir)['step'] == CONFIG.total_steps
  assert 'summary.json' in capsys.readouterr().err


def test_lines_that_were_lost_are_counted_and_the_run_goes_on(
  tmp_path: Path, capsys: Capture
) -> None:
  run_dir = tmp_path / 'run'

  def go_on(total_steps: int) -> tuple[dict[str, int], list[str]]:
    config = dataclasses.replace(CONFIG, total_steps=total_steps, eval_every=1600, eval_episodes=2)
    missing = loop.train(config, run_dir, override=True, quiet=True).get('missing_lines', {})
    warned = [x for x in capsys.readouterr().err.splitlines() if 'missing_lines' in x]
    return missing, [
      re.search(r'(\w+\.jsonl) has ([\d,]+) lines of the ([\d,]+)', x).groups() for x in warned
    ]  # type: ignore[union-attr, misc]

  assert go_on(3200) == ({}, [])
  assert go_on(4800) == ({}, [])  # its checkpoint knows of both evaluations before
  whole = (run_dir / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (run_dir / 'metrics.jsonl').write_text(''.join(whole[:2] + whole[14:]))
  (run_dir / 'eval.jsonl').unlink()
  missing, warned = go_on(6400)
  assert missing['metrics.jsonl'] == 12 and missing['eval.jsonl'] >= 2
  assert ('metrics.jsonl', '3', '15') in warned and len(warned) == 2
  assert go_on(8000) == (missing, [])  # a later checkpoint remembers
  (run_dir / 'summary.json').unlink()
  later = (run_dir / 'metrics.jsonl').read_text().splitlines(keepends=True)[3:]
  (run_dir / 'metrics.jsonl').write_text(''.join(whole + later))
  assert go_on(8000) == ({'eval.jsonl': missing['eval.jsonl']}, [])
  assert [line['step'] for line in lines(run_dir)] == list(range(320, 8001, 320))


class At:
  """A sink that does something at a step, once."""

  def __init__(self, step: int, what: Callable[[], None]) -> None:
    self.step, self.what = step, what

  def __call__(self, *args: Any) -> At:
    return self

  def write(self, line: dict[str, Any]) -> None:
    if line['step'] == self.step:
      self.what()

  def close(self) -> None: ...


def contents(folder: Path) -> dict[str, bytes]:
  return {str(p.relative_to(folder)): p.read_bytes() for p in every_file(folder)}


@pytest.mark.parametrize(  # between checkpoints, and at the end
  'step', [960, pytest.param(3200, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('replaced', [True, False])
def test_a_directory_that_is_removed_or_replaced_ends_the_run(
  step: int, replaced: bool, finished: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
  run_dir, old = tmp_path / 'run', tmp_path / 'old'

  def replace() -> None:
    if step > 1600:
      until(lambda: 1600 in checkpoints(run_dir))
    run_dir.rename(old)
    if replaced:
      shutil.copytree(finished, run_dir)  # another run's, with a lock of its own
      (run_dir / 'replay' / '7').mkdir(parents=True)  # which that is just writing

  monkeypatch.setitem(sinks.SINKS, 'replace', At(step, replace))
  with pytest.raises(errors.RunError, match='replaced'):
    loop.train(CONFIG, run_dir, sinks=('replace',))
  assert checkpoints(old) == [1600][: step > 1600]
  if replaced:
    assert contents(run_dir) == contents(finished)
    assert (run_dir / 'replay' / '7').is_dir()
  else:
    assert not run_dir.exists()


def test_params_sha256_is_what_the_contract_says() -> None:
  params = {'b': jnp.arange(3, dtype=jnp.int32), 'a': {'z': jnp.ones([2, 2]), 'y': jnp.float32(1)}}
  expected = hashlib.sha256(
    b"['a']['y'] float32 ()\n" + np.float32(1).tobytes()
    + b"['a']['z'] float32 (2, 2)\n" + np.ones([2, 2], np.float32).tobytes()
    + b"['b'] int32 (3,)\n" + np.arange(3, dtype=np.int32).tobytes()
  )  # fmt: skip
  assert hashes.params_sha256(params) == expected.hexdigest()
  for other in (
    {**params, 'b': params['b'].at[0].set(1)},
    {**params, 'b': params['b'].astype(jnp.uint32)},
    {**params, 'b': params['b'][None]},
    {'a': params['a'], 'c': params['b']},
  ):
    assert hashes.params_sha256(other) != expected.hexdigest()


@pytest.mark.slow
def test_two_seeds(two_seeds: Path, finished: Path) -> None:
  for line, alone in zip(lines(two_seeds), lines(finished), strict=True):
    assert len(line['episode_return_by_seed']) == len(line['episodes_by_seed']) == 2
    assert line['episodes'] == sum(line['episodes_by_seed'])
    mean = np.average(line['episode_return_by_seed'], weights=line['episodes_by_seed'])
    assert line['episode_return'] == pytest.approx(mean)
    assert line['episodes_by_seed'][0] == alone['episodes']
  assert len(summary(two_seeds)['episode_return_by_seed']) == 2


def test_finished_says_so(finished: Path, capsys: Capture) -> None:
  before = (finished / 'summary.json').read_bytes()
  assert loop.train(CONFIG, finished) == summary(finished)
  assert 'step 3,200' in capsys.readouterr().err
  assert (finished / 'summary.json').read_bytes() == before


def test_metrics_that_are_not_finite_are_null(tmp_path: Path) -> None:
  """Not the loss or the parameters, which end a run: an infinite ratio is clipped in the loss."""
  loop.train(change(agent=OddMetric(network=SMALL), total_steps=640), tmp_path / 'run', quiet=True)
  assert all(line['odd'] is None for line in lines(tmp_path / 'run'))
  assert all(isinstance(line['loss'], float) for line in lines(tmp_path / 'run'))


@dataclasses.dataclass(frozen=True)
class OddMetric(Impala):
  """An agent with a metric that is infinite."""

  def learn(self, train, sample, key):
    train, priority, found = super().learn(train, sample, key)
    return train, priority, {**found, 'odd': found['loss'] * 0 + jnp.inf}


# --- starting again -----------------------------------------------------------------------------


def test_a_changed_configuration_is_refused(finished: Path, tmp_path: Path) -> None:
  changed = change(total_steps=6400, agent=dataclasses.replace(CONFIG.agent, discount=0.5))
  with pytest.raises(UsageError) as e:
    loop.train(changed, finished)
  assert 'agent.discount: 0.99 -> 0.5' in str(e.value)
  assert 'total_steps: 3200 -> 6400' in str(e.value)
  assert '--override' in str(e.value)
  assert summary(finished)['step'] == 3200


def test_results_without_checkpoints_are_not_replaced(finished: Path, tmp_path: Path) -> None:
  run_dir, more = tmp_path / 'run', change(total_steps=6400)
  shutil.copytree(finished, run_dir, ignore=shutil.ignore_patterns('checkpoints'))
  assert loop.train(CONFIG, run_dir) == summary(finished)
  with pytest.raises(UsageError, match='--override'):
    loop.train(more, run_dir)
  assert summary(run_dir) == summary(finished) and lines(run_dir) == lines(finished)
  opening.refuse(more, run_dir, override=True)
  (run_dir / 'summary.json').unlink()
  opening.refuse(more, run_dir, override=False)  # killed before its first checkpoint
  (run_dir / 'best').mkdir()
  (run_dir / 'best/320.safetensors').touch()
  with pytest.raises(UsageError, match='--override'):
    opening.refuse(more, run_dir, override=False)
  (run_dir / 'checkpoints').mkdir()  # killed after an evaluation and before its first checkpoint
  opening.refuse(more, run_dir, override=False)


def test_a_lost_record_is_not_replaced_by_that_of_another_run(
  finished: Path, tmp_path: Path, capsys: Capture
) -> None:
  run_dir = tmp_path / 'run'
  shutil.copytree(finished, run_dir)
  for name in ('config.json', 'summary.json'):
    (run_dir / name).unlink()
  code, _, err = called(capsys, 'train', '--run-dir', str(run_dir))
  assert code == 2 and 'config.json' in err and not (run_dir / 'config.json').exists()
  with pytest.raises(UsageError, match='--unroll-length'):
    loop.train(change(unroll_length=16), run_dir, quiet=True)
  assert not (run_dir / 'config.json').exists()
  assert loop.train(CONFIG, run_dir, quiet=True)['step'] == 3200


@pytest.mark.slow
def test_override_goes_on_with_the_new_configuration(tmp_path: Path) -> None:
  loop.train(change(total_steps=1600), tmp_path, quiet=True)
  first = lines(tmp_path)
  loop.train(change(total_steps=3200), tmp_path, override=True, quiet=True)
  assert lines(tmp_path)[: len(first)] == first  # it went on, and did not begin again
  assert lines(tmp_path)[-1]['step'] == summary(tmp_path)['step'] == 3200
  assert json.loads((tmp_path / 'config.json').read_text())['total_steps'] == 3200


def test_override_of_a_finished_run_is_refused(finished: Path) -> None:
  before = (finished / 'summary.json').read_bytes()
  changed = change(agent=dataclasses.replace(CONFIG.agent, discount=0.5))
  with pytest.raises(UsageError, match=r'step 3,200(.|\n)*agent.discount: 0.99 -> 0.5'):
    loop.train(changed, finished, override=True)
  assert (finished / 'summary.json').read_bytes() == before


def test_override_may_change_all_of_a_run_without_a_checkpoint(tmp_path: Path) -> None:
  (tmp_path / 'config.json').write_text(json.dumps(to_json(change(num_envs=8))))
  loop.train(change(total_steps=64), tmp_path, override=True, quiet=True)
  assert summary(tmp_path)['step'] == 64


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'agent': Impala(network=ActorCritic(hidden=(8,)))}, 'state'),
    ({'num_envs': 8}, 'num_envs: 4 -> 8'),
    ({'unroll_length': 4}, 'unroll_length: 8 -> 4'),
    ({'architecture': 'sebulba'}, '"anakin" -> "sebulba"'),
    ({'devices': 2}, '--devices 1'),
  ],
)
def test_override_cannot_change_the_state(
  changed: dict, message: str, tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setitem(sinks.SINKS, 'stop', StopAt(320))
  with pytest.raises(errors.Stopped):
    loop.train(CONFIG, tmp_path, sinks=('stop',), quiet=True)
  record, saved = (tmp_path / 'config.json').read_bytes(), checkpoints(tmp_path)
  monkeypatch.setattr(AnakinDriver, 'compile', lambda self: pytest.fail('it is too late to refuse'))
  with pytest.raises(UsageError, match=message):
    loop.train(change(**changed), tmp_path, override=True, quiet=True)
  assert len(saved) == 1 and checkpoints(tmp_path) == saved
  assert (tmp_path / 'config.json').read_bytes() == record  # and is still what can be resumed


def test_a_checkpoint_tells_of_the_steps_it_counts(tmp_path: Path) -> None:
  """Where no record is left to compare with."""
  loop.train(change(total_steps=64), tmp_path, quiet=True)
  for name in ('config.json', 'summary.json'):
    (tmp_path / name).unlink()
  with pytest.raises(UsageError, match=r'counts 32.*64'):
    loop.train(change(num_envs=8), tmp_path, quiet=True)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
  with (tmp_path / 'lock').open('w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match='in use'):
      loop.train(CONFIG, tmp_path)
  loop.train(change(total_steps=32), tmp_path, quiet=True)


@pytest.mark.slow
def test_override_cannot_change_the_lag(tmp_path: Path) -> None:
  """With lag 1 a checkpoint holds the parameters before the last update as well."""
  config = change(architecture='sebulba', lag='1', total_steps=320)
  loop.train(config, tmp_path, quiet=True)
  longer = change(config, total_steps=640, lag='0')
  with pytest.raises(UsageError, match='state') as e:
    loop.train(longer, tmp_path, override=True, quiet=True)
  assert 'lag: "1" -> "0"' in str(e.value)


REMEMBERS = DQN(
  network=QNetwork(hidden=(8,)), n_step=2,
  buffer=Buffer(capacity=400, min_size=64, batch_size=8, priority_exponent=0.5),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
  ('place', 'what', 'message'),
  slow_after(1,
    ('device', dict(priority_exponent=0.25), 'priority_exponent 0.5 -> 0.25'),
    ('device', dict(n_step=3), 'steps of a window 2 -> 3'),
    ('host', dict(priority_exponent=0.25), 'priority_exponent 0.5 -> 0.25'),
    ('host', dict(capacity=500), 'capacity 400 -> 500'),
    ('host', dict(n_step=1), 'steps of a window 2 -> 1'),
  ),
)  # fmt: skip
def test_override_cannot_change_what_replay_holds(
  place: str, what: dict[str, Any], message: str, tmp_path: Path
) -> None:
  config = change(agent=REMEMBERS, total_steps=320)
  if place == 'host':
    config = change(config, architecture='sebulba', replay='host')
  loop.train(config, tmp_path, quiet=True)
  agent = dataclasses.replace(REMEMBERS, n_step=what.pop('n_step', 2))
  agent = dataclasses.replace(agent, buffer=dataclasses.replace(agent.buffer, **what))
  longer = change(config, agent=agent, total_steps=640)
  with pytest.raises(UsageError, match=f'replay of other settings(.|\n)*  {message}\n') as e:
    loop.train(longer, tmp_path, override=True, quiet=True)
  assert str(e.value).count('->') == 1
  assert checkpoints(tmp_path) == [320] and not (tmp_path / 'damaged').exists()
  if message.startswith('priority'):  # what it doesn't depend on can be changed
    agent = dataclasses.replace(
      REMEMBERS, buffer=dataclasses.replace(REMEMBERS.buffer, samples_per_insert=4, min_size=80)
    )
    longer = change(config, agent=agent, total_steps=640)
    assert loop.train(longer, tmp_path, override=True, quiet=True)['step'] == 640


class Away:
  """A sink whose service goes away at some step."""

  def __init__(self, run_dir: Path) -> None:
    pass

  def write(self, line: metrics.Line) -> None:
    if line['step'] == 320:
      raise ConnectionError('the service is away')

  def close(self) -> None:
    pass


def test_a_sink_that_fails_loses_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
  monkeypatch.setitem(sinks.SINKS, 'away', Away)
  config = change(log_every=160)
  with pytest.raises(errors.RunError, match=r'saved at step 320'):
    loop.train(config, tmp_path / 'half', sinks=('away',), quiet=True)
  resumed = loop.train(config, tmp_path / 'half', quiet=True)
  assert (
    resumed['params_sha256'] == loop.train(config, tmp_path / 'whole', quiet=True)['params_sha256']
  )
  steps = [line['step'] for line in metrics.read(tmp_path / 'half' / 'metrics.jsonl')]
  assert steps == sorted(set(steps)) and 320 in steps


def test_a_call_is_at_most_twice_the_one_before() -> None:
  pace = updates.Pace()
  asked = []
  for _ in range(6):
    asked.append(pace.updates())
    pace.observe(asked[-1], 1e-6 * asked[-1])
  assert asked == [1, 2, 4, 8, 16, 32]
  pace.observe(32, 32.0)  # which turned out dear
  assert pace.updates() == 1


def test_calls_end_where_learning_begins(tmp_path: Path, monkeypatch: Patch) -> None:
  """Updates before that cost next to nothing: a call of thousands may be a few that learn."""
  calls: list[int] = []
  advance = AnakinDriver.advance

  def observed(self: Any, state: Any, updates: int, give_up: Any) -> Any:
    calls.append(updates)
    return advance(self, state, updates, give_up)

  monkeypatch.setattr(AnakinDriver, 'advance', observed)
  monkeypatch.setattr(updates, 'CALL_SECONDS', 1e9)
  agent = DQN(
    network=QNetwork(hidden=(8,)), buffer=Buffer(capacity=1000, min_size=320, batch_size=8)
  )
  config = change(agent=agent, num_envs=4, unroll_length=2, total_steps=800, log_every=800)
  loop.train(config, tmp_path, quiet=True)
  ends = np.cumsum(calls).tolist()
  assert 320 // 8 - 1 in ends  # the next one is the first that learns
  assert calls[ends.index(39) + 1] == 1


# --- NaN ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sick(PPO):
  """PPO whose parameters or loss stop being finite after some updates."""

  after: int = 60
  sick: str = 'loss'

  def learn(self, train, sample, key):
    train, priority, found = super().learn(train, sample, key)
    count = jax.tree.leaves(train.rest)[0]  # of gradient steps
    bad = jnp.where(count > self.after * self.epochs * self.minibatches, jnp.nan, 0.0)
    if self.sick == 'loss':
      return train, priority, {**found, 'loss': found['loss'] + bad}
    params = train.params._replace(network=jax.tree.map(lambda x: x + bad, train.params.network))
    return train._replace(params=params), priority, found


@pytest.mark.parametrize('sick', [pytest.param('loss', marks=pytest.mark.slow), 'parameter'])
@pytest.mark.parametrize('seeds', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nan_stops_the_run_and_is_never_saved(sick: str, seeds: int, tmp_path: Path) -> None:
  config = change(agent=Sick(network=SMALL, sick=sick, minibatches=1, epochs=1), seeds=seeds)
  with pytest.raises(errors.RunError) as e:
    loop.train(config, tmp_path, quiet=True)
  assert re.search('(loss|parameter) is NaN or infinite at step 1,9(52|84);', str(e.value))
  assert 'checkpoint is step 1,600' in str(e.value)
  assert checkpoints(tmp_path) == [1600]
  if sick == 'loss':  # the very update is known, however many there were in a call
    assert f'step {61 * 32:,}' in str(e.value)
  result = evaluate(tmp_path, 3, acting=('greedy',), allow_code=['test_loop'])
  assert result['step'] == 1600


def test_nan_is_told_if_the_checkpoint_before_has_failed(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  def fail(*args: Any) -> None:
    raise errors.CheckpointError('no room')

  monkeypatch.setattr(stored.StoredCheckpoint, 'verify_draft', fail)
  config = change(agent=Sick(network=SMALL, sick='parameter', minibatches=1, epochs=1))
  with pytest.raises(errors.RunError, match='NaN or infinite at step 1,9') as e:
    loop.train(config, tmp_path, quiet=True)
  assert '1,600' not in str(e.value) and checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_run_that_dies_early_has_a_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
  """Though the first that was asked for is far away."""
  monkeypatch.setattr(updates, 'FIRST_CHECKPOINT_SECONDS', 0.0)
  agent = Sick(network=SMALL, minibatches=1, epochs=1)
  with pytest.raises(errors.RunError, match='checkpoint is step'):
    loop.train(change(agent=agent, checkpoint_every=10**9), tmp_path, quiet=True)
  assert 0 < checkpoints(tmp_path)[-1] < 1952


@pytest.mark.parametrize(
  ('seconds', 'every', 'least', 'most'),
  [
    ((math.inf, math.inf), 0, 1, 1), ((0.0, math.inf), 0, 2, 2), ((0.0, 0.0), 10**9, 2, 2),
    ((0.0, 0.0), 0, 5, 100), ((math.inf, 0.0), 0, 1, 1),
  ],
)  # fmt: skip
def test_when_checkpoints_are_due(
  seconds: tuple[float, float],
  every: int,
  least: int,
  most: int,
  tmp_path: Path,
  monkeypatch: Patch,
) -> None:
  """After the seconds to the first, and after the seconds between two unless steps are between them."""
  monkeypatch.setattr(updates, 'FIRST_CHECKPOINT_SECONDS', seconds[0])
  monkeypatch.setattr(updates, 'CHECKPOINT_SECONDS', seconds[1])
  config = change(checkpoint_every=every, keep=100, total_steps=1600)
  loop.train(config, tmp_path / 'run', quiet=True)
  assert least <= len(checkpoints(tmp_path / 'run')) <= most


def test_quiet_is_about_progress_alone(
  finished: Path, capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
  shutil.copytree(finished, tmp_path / 'run')
  (tmp_path / 'run' / 'summary.json').unlink()
  (tmp_path / 'run' / 'checkpoints' / '9.orbax-checkpoint-tmp-1').mkdir()
  elsewhere = {**hashes.machine(), 'jax': '9.9'}
  monkeypatch.setattr(save_and_resume, 'machine', lambda: elsewhere)
  loop.train(CONFIG, tmp_path / 'run', quiet=True)
  told = capsys.readouterr().err
  assert '9.orbax' in told and 'not bit for bit' in told
  assert 'compil' not in told and 'resuming' not in told
  assert checkpoints(tmp_path / 'run') == [1600, 3200]
  assert not list((tmp_path / 'run' / 'checkpoints').glob('*tmp*'))


def test_nan_at_once(tmp_path: Path) -> None:
  agent = Impala(network=SMALL, learning_rate=1e38)
  with pytest.raises(errors.RunError, match='NaN'):
    loop.train(change(agent=agent), tmp_path, quiet=True)
  assert checkpoints(tmp_path) == []


# --- what fails while it learns ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failing(Impala):
  """Impala that calls a function on the host, which raises at the 61st update."""

  def learn(self, train, sample, key):
    train, priority, found = super().learn(train, sample, key)
    count = jax.tree.leaves(train.rest)[0]
    jax.debug.callback(fail, count)
    return train, priority, found


def test_what_failed_first_is_told_where_it_cannot_be_saved_either(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setitem(sinks.SINKS, 'away', Away)
  save = save_and_resume.Saves.save

  def fails(self: Any, update: int, state: Any) -> None:
    if update * self._config.steps_per_update >= 320:
      raise TypeError('no JSON')
    save(self, update, state)

  monkeypatch.setattr(save_and_resume.Saves, 'save', fails)
  with pytest.raises(errors.RunError) as e:
    config = change(log_every=160, checkpoint_every=160)
    loop.train(config, tmp_path, sinks=('away',), quiet=True)
  told = str(e.value)
  assert 'the service is away' in told
  assert 'TypeError: no JSON; the last checkpoint is step 160' in told


def fail(count: Any) -> None:
  if count > 60:
    raise ZeroDivisionError('the learner broke')


@pytest.mark.parametrize(
  'architecture', ['anakin', pytest.param('sebulba', marks=pytest.mark.slow)]
)
def test_a_failure_of_the_learner_is_told_with_its_traceback(
  architecture: str, tmp_path: Path
) -> None:
  """Its state is lost, having been given away; what was saved before is named, and is there."""
  agent = Failing(network=SMALL)
  with pytest.raises(errors.RunError) as e:
    loop.train(change(agent=agent, architecture=architecture), tmp_path, quiet=True)
  assert 'ZeroDivisionError' in str(e.value)
  assert 'Traceback (most recent call last)' in str(e.value)
  assert 'saved at step' in str(e.value)
  assert checkpoints(tmp_path)[0] == 1600
  result = evaluate(tmp_path, 3, acting=('greedy',), allow_code=['test_loop'])
  assert result['step'] == checkpoints(tmp_path)[-1]


# --- what does not fit --------------------------------------------------------------------------


def make(config: Config) -> None:
  program = build(config)
  program.shapes  # noqa: B018, traces the agent


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (change(num_envs=6, devices=4), r'--num-envs 6.*4'),
    (change(num_envs=2, devices=4), r'--num-envs 2.*4'),
    (change(devices=9), r'--devices 9.*1.*8'),
    (change(devices=0), '--devices 0'),
    (change(agent=PPO(minibatches=3)), r'8 steps.*3 minibatches'),
    (
      change(agent=PPO(network=ActorCritic(core='gru'), minibatches=8)),
      r'4 environments.*8 minibatches',
    ),
    (change(env='gymnax:CartPole-v1', agent=Impala(network=ActorCritic(torso='nature'))),
     "'nature'"),
    (change(agent=Impala(network=ActorCritic(squash=True))), 'Discrete'),
    (change(env='podrace:catch,rows=1'), 'rows'),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_numbers(config: Config, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make(config)


@pytest.mark.parametrize(
  ('cls', 'sizes'),
  [
    (PPO, {'minibatches': 0}),
    (PPO, {'epochs': -1}),
    (ActorCritic, {'hidden': (64, 0)}),
    (ActorCritic, {'core_size': 0}),
  ],
)
def test_sizes_below_1_are_refused(cls: Any, sizes: dict) -> None:
  with pytest.raises(ValueError, match=f'{next(iter(sizes))} must be at least 1'):
    cls(**sizes)


def test_a_space_that_no_head_is_for() -> None:
  from gymnasium import spaces

  env = envs.make('podrace:catch')
  for name, space in (('action_space', spaces.Text(3)), ('observation_space', spaces.Text(3))):
    odd = {'action_space': env.action_space, 'observation_space': env.observation_space}
    with pytest.raises(ValueError, match='Text'):
      bind(Impala(), type('Odd', (), {**odd, name: space})())


@pytest.mark.parametrize(
  ('architecture', 'devices', 'advice'),
  [
    ('anakin', {'devices': 2}, 'give --devices 2 --override'),
    (
      'sebulba',
      {'actor_devices': '0', 'learner_devices': '1,2'},
      'give --learner-devices with 2, of all processes together, and --override; the run had --actor-devices 0 '
      '--learner-devices 1,2',
    ),
    ('sebulba', {}, 'give --learner-devices with 2, of all processes together, and --override; the run had no options for its devices'),
  ],
)  # fmt: skip
def test_another_number_of_devices_is_refused_with_what_to_give(
  architecture: Any, devices: dict[str, Any], advice: str, tmp_path: Path
) -> None:
  config = dataclasses.replace(PRESETS['catch'](), architecture=architecture)
  old = dataclasses.replace(config, **devices)
  (tmp_path / 'config.json').write_text(json.dumps(to_json(old)))
  program: Any = SimpleNamespace(mesh=SimpleNamespace(size=1, shape={'data': 1}))
  one = Fit(config, program, tmp_path)
  with pytest.raises(UsageError, match=r'on 2.*1') as told:
    one.check({'step': 1024, 'mesh': 2}, None)
  assert str(told.value).endswith(f': {advice}')


@pytest.mark.parametrize(
  ('name', 'value'),
  [('jax_threefry_partitionable', False), ('jax_default_prng_impl', 'rbg')],
)
def test_other_random_numbers_are_refused(
  name: str, value: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
  program: Any = SimpleNamespace(mesh=SimpleNamespace(size=1, shape={'data': 1}), windows=None)
  one = Fit(PRESETS['catch'](), program, tmp_path)
  monkeypatch.setattr(Fit, 'shapes', lambda self, sums=None: '0')
  meta = one.record() | {'step': 1024, 'machine': {}}
  one.check(meta, None)
  one.check({k: x for k, x in meta.items() if k != 'random'}, None)  # of an older podrace
  now = {**random_settings(), name: value}
  monkeypatch.setattr(compatibility, 'random_settings', lambda: now)
  with pytest.raises(UsageError, match=f'{name.upper()}={meta["random"][name]}'):
    one.check(meta, None)
