"""podrace from scripts and notebooks."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from shared_programs import shared_programs  # noqa: F401
from shorthand import Capture, Patch

import podrace
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.commands.configure import parse_words
from podrace.errors import RunError, UnknownName, UsageError
from podrace.experiments import runs
from podrace.networks import QNetwork
from podrace.replay import Buffer
from podrace.run import loop as run
from podrace.run import metrics, periodic_evaluation
from podrace.run.callbacks import Callbacks
from podrace.run.directory import saved_steps
from podrace.run.evaluate import evaluate
from podrace.run.periodic_evaluation import Evaluations
from podrace.settings.config import Config
from podrace.settings.defaults import with_defaults
from podrace.settings.presets import PRESETS
from podrace.settings.resolved import resolve

SMALL = dict(num_envs=8, unroll_length=8, total_steps=6_400, log_every=640, devices=1)


@pytest.fixture
def several_seeds() -> Iterator[None]:
  """For programs of several seeds: JAX takes the transpositions of vmap for uses of a key."""
  jax.config.update('jax_debug_key_reuse', False)
  yield
  jax.config.update('jax_debug_key_reuse', True)


class Counting:
  """Counts lines, and ends or fails at one."""

  def __init__(self, end_at: int = 0, fail_at: int = 0) -> None:
    self.lines, self.end_at, self.fail_at = 0, end_at, fail_at

  def __call__(self, line: dict[str, Any]) -> dict[str, float]:
    self.lines += 1
    if self.lines == self.fail_at:
      raise ZeroDivisionError('of my own')
    if self.lines == self.end_at:
      raise podrace.EndTraining('enough', {'my_lines': self.lines})
    return {'my_lines': self.lines}

  def state(self) -> Any:
    return self.lines

  def restore(self, state: Any) -> None:
    self.lines = state


def test_a_run_and_what_came_of_it(tmp_path: Path) -> None:
  config = podrace.configure('catch', **SMALL)
  result = podrace.train(config, tmp_path / 'run', quiet=True)
  assert result.summary == json.loads((tmp_path / 'run/summary.json').read_text())
  assert [line['step'] for line in result.metrics] == list(range(640, 6_401, 640))
  assert list(result.frame['step']) == [line['step'] for line in result.metrics]
  found = result.evaluate(5)
  assert found['episodes'] == found['sampled_episodes'] == 5 and found['step'] == 6_400
  sampled = result.evaluate(5, acting='sampled', checkpoint=6_400)
  assert sampled['step'] == 6_400
  assert sampled['episode_return_mean'] == found['sampled_episode_return_mean']
  assert not any(name.startswith('sampled') for name in sampled)
  with pytest.raises(UsageError, match="greedy or sampled, not 'gredy'"):
    result.evaluate(5, acting='gredy')
  again = podrace.train(config, tmp_path / 'run', quiet=True)
  assert again.summary == result.summary
  assert podrace.Result.load(tmp_path / 'run') == result
  (tmp_path / 'run/summary.json').rename(tmp_path / 'summary.json')
  with pytest.raises(UsageError, match='not finished'):
    podrace.Result.load(str(tmp_path / 'run'))
  (tmp_path / 'summary.json').rename(tmp_path / 'run/summary.json')
  assert result.export(tmp_path / 'policy', checkpoint=6_400)['step'] == 6_400
  podrace.load_policy(tmp_path / 'policy').act(np.zeros((10, 5)))


@pytest.mark.parametrize(
  ('method', 'arguments'),
  [
    ('evaluate', {'episodes': 2.0}),
    ('evaluate', {'seed': '0'}),
    ('evaluate', {'env': None}),
    ('evaluate', {'checkpoint': 1.5}),
    ('export', {'folder': 'x', 'member': '0'}),
    ('export', {'folder': 'x', 'checkpoint': None}),
  ],
)
def test_arguments_of_other_types_are_refused(method: str, arguments: Any, tmp_path: Path) -> None:
  result = podrace.Result(tmp_path, podrace.configure('catch'), {})
  with pytest.raises(UsageError, match=list(arguments)[-1]):
    getattr(result, method)(**arguments)


def halved(rate: float) -> float:
  return rate / 2


@dataclasses.dataclass(frozen=True)
class Scheduled(Impala):
  """An agent with a function as a setting."""

  schedule: Any = None


def test_a_run_that_json_cannot_make_again_goes_on_and_is_evaluated(tmp_path: Path) -> None:
  settings: Any = SMALL | dict(total_steps=640, agent=Scheduled(schedule=halved))
  result = podrace.train(podrace.configure('catch', **settings), tmp_path / 'run', quiet=True)
  assert result.evaluate(2)['episodes'] == 2
  assert result.export(tmp_path / 'policy')['step'] == 640
  record = tmp_path / 'run/config.json'
  assert json.loads(record.read_text())['agent']['schedule'] == {'repr': f'{__name__}:halved'}
  more = podrace.configure('catch', **settings | dict(total_steps=1280))
  assert podrace.train(more, tmp_path / 'run', quiet=True).summary['step'] == 1280


class Interrupted(Counting):
  def __call__(self, line: dict[str, Any]) -> dict[str, float]:
    if self.lines == 2:
      signal.raise_signal(signal.SIGINT)
    return super().__call__(line)


def test_ctrl_c_is_a_short_keyboard_interrupt_after_saving(tmp_path: Path) -> None:
  config = podrace.configure('catch', **SMALL)
  with pytest.raises(KeyboardInterrupt) as raised:
    podrace.train(config, tmp_path / 'run', [Interrupted()], quiet=True)
  error = raised.value
  assert error.__cause__ is None and error.__suppress_context__
  assert len(traceback.extract_tb(error.__traceback__)) == 2  # here, and podrace.train
  assert saved_steps(tmp_path / 'run')
  whole = podrace.train(config, tmp_path / 'run', [Interrupted()], quiet=True)
  assert whole.summary['step'] == 6_400


def test_functions_without_a_name_are_not_compared_and_it_says_so(
  tmp_path: Path, capsys: Capture
) -> None:
  def trained(steps: int, schedule: Any) -> str:
    settings: Any = SMALL | dict(total_steps=steps, agent=Scheduled(schedule=schedule))
    podrace.train(podrace.configure('catch', **settings), tmp_path / 'run', quiet=True)
    return capsys.readouterr().err

  assert 'agent.schedule' not in trained(640, lambda rate: rate)
  assert 'agent.schedule' in trained(1280, lambda rate: 2 * rate)


def test_a_new_run_has_a_directory_of_its_own(tmp_path: Path, monkeypatch: Patch) -> None:
  monkeypatch.chdir(tmp_path)
  config = podrace.configure('catch', **SMALL)
  paths = {podrace.train(config, quiet=True).run_dir for _ in range(2)}
  assert len(paths) == 2 and all(p.parent == Path('runs') for p in paths)


def test_it_trains_in_a_thread_too(tmp_path: Path) -> None:
  """Where Python has no signal handlers."""
  found: list[Any] = []
  config = podrace.configure('catch', **SMALL)
  work = threading.Thread(
    target=lambda: found.append(podrace.train(config, tmp_path / 'a', quiet=True))
  )
  work.start()
  work.join(120)
  assert found[0].summary['step'] == 6_400


@pytest.mark.parametrize(
  'preset, settings, expected',
  [
    ('catch', {'seeds': 2}, dataclasses.replace(PRESETS['catch'](), seeds=2)),
    ('cartpole', {'agent': {'learning_rate': 0.5}},
     dataclasses.replace(PRESETS['cartpole'](), agent=dataclasses.replace(PRESETS['cartpole']().agent, learning_rate=0.5))),
    ('catch', {'agent': DQN(double=False)}, dataclasses.replace(PRESETS['catch'](), agent=DQN(double=False))),
  ],
)  # fmt: skip
def test_configure(preset: str, settings: Any, expected: Any) -> None:
  assert podrace.configure(preset, **settings) == expected


@pytest.mark.parametrize(
  'words, preset, settings',
  [
    ('catch --agent dqn', 'catch', {'agent': 'dqn'}),
    ('cartpole --agent dqn --num-envs 8', 'cartpole', {'agent': 'dqn', 'num_envs': 8}),
    ('cartpole --agent ppo', 'cartpole', {'agent': 'ppo'}),
    ('catch --env gymnax:Asterix-MinAtar --agent ppo', 'catch', {'env': 'gymnax:Asterix-MinAtar', 'agent': 'ppo'}),
    ('--agent ppo', None, {'agent': 'ppo'}),
    ('--env gymnax:Acrobot-v1', None, {'env': 'gymnax:Acrobot-v1'}),
    ('--seeds 2', None, {'seeds': 2}),
  ],
)  # fmt: skip
def test_configure_is_the_command_line(words: str, preset: Any, settings: Any) -> None:
  assert podrace.configure(preset, **settings) == parse_words(words.split(), 'podrace train')


def test_configure_changes_what_is_within() -> None:
  config = podrace.configure('catch', agent={'network': {'hidden': (7,)}})
  assert config.agent.network.hidden == (7,)
  assert config.agent.learning_rate == PRESETS['catch']().agent.learning_rate


def test_configure_takes_the_defaults_of_the_environment() -> None:
  config = podrace.configure(env='gymnax:Asterix-MinAtar', agent='ppo')
  assert config == with_defaults(
    Config(agent=PPO(), env='gymnax:Asterix-MinAtar'), 'gymnax:Asterix-MinAtar'
  )
  assert config.agent != PPO()
  assert podrace.configure(env='gymnasium:CartPole-v1', agent='ppo').architecture == 'sebulba'


@pytest.mark.parametrize(
  'preset, settings, message',
  [
    ('catsh', {}, r"'catsh'.*catch"),
    ('catch', {'sedes': 2}, r"'sedes'.*seeds"),
    ('catch', {'agent': {'learning_rat': 2}}, r"Impala 'learning_rat'.*learning_rate"),
    ('catch', {'agent': {'discount': 2}}, 'discount'),
    ('catch', {'agent': {'network.hidden': (8,)}}, r"'network': .'hidden': "),
    ('catch', {'num_envs': 'x'}, "num_envs.*'x'"),
    ('catch', {'agent': 'a2c'}, "'a2c'"),
    ('catch', {'agent': 5}, 'agent is 5'), ('catch', {'agent': PPO}, r'PPO\(\)'), ('catch', {'agent': {1: 2}}, 'not 1'),
    ('catch', {'env': None}, 'env is None'), (None, {'env': b'podrace:catch'}, "env is b'"), ('catch', {'log': 7}, 'log is 7'),
  ],
)  # fmt: skip
def test_configure_refuses(preset: str, settings: Any, message: str) -> None:
  with pytest.raises(UsageError, match=message):
    podrace.configure(preset, **settings)


def test_names_are_those_of_the_package() -> None:
  names = {'train', 'configure', 'Result', 'Config', 'load_policy', 'EndTraining'}
  assert names <= set(dir(podrace)) and all(getattr(podrace, name) for name in podrace.__all__)
  with pytest.raises(UsageError, match='NoneType'):
    podrace.train(None)  # type: ignore[arg-type]


# --- callbacks ------------------------------------------------------------------------------------


def test_a_callback_reports_metrics_and_ends_the_run(tmp_path: Path) -> None:
  config = podrace.configure('catch', **SMALL)
  result = podrace.train(config, tmp_path / 'run', [Counting(end_at=4)], quiet=True)
  assert [line.get('my_lines') for line in result.metrics] == [1, 2, 3, 4]
  assert result.summary['ended'] == 'enough' and result.summary['step'] == 4 * 640
  seen = runs.inspect_run(tmp_path / 'run')
  assert (seen.state, seen.why) == ('finished', 'enough')
  # Again, it is finished; with a longer run, it goes on.
  again = podrace.train(config, tmp_path / 'run', [Counting(end_at=4)], quiet=True)
  assert again.summary == result.summary
  longer = dataclasses.replace(config, total_steps=7_040)
  with pytest.raises(UsageError, match='override'):
    podrace.train(longer, tmp_path / 'run', quiet=True)
  result = podrace.train(longer, tmp_path / 'run', [Counting(end_at=8)], quiet=True)
  assert result.summary['ended'] == 'enough' and result.summary['step'] == 8 * 640


def test_a_callback_goes_on_where_it_was(tmp_path: Path) -> None:
  config = podrace.configure('catch', **SMALL)
  whole = podrace.train(config, tmp_path / 'whole', [Counting()], quiet=True)
  with pytest.raises(RunError, match='of my own'):
    podrace.train(config, tmp_path / 'run', [Counting(fail_at=5)], quiet=True)
  assert not (tmp_path / 'run/summary.json').exists()
  result = podrace.train(config, tmp_path / 'run', [Counting()], quiet=True)
  assert result.summary['params_sha256'] == whole.summary['params_sha256']
  # The line at which it failed was its fifth; it is saved without what the callback would have said.
  assert [line.get('my_lines') for line in result.metrics] == [1, 2, 3, 4, None, *range(6, 11)]


def test_a_change_of_a_line_is_kept_if_a_sink_fails_there(tmp_path: Path) -> None:
  class Shrink:
    def __call__(self, line: Any) -> None: ...
    def transform(self, train: Any, line: Any) -> Any:
      return train._replace(params=jax.tree.map(lambda x: 0.9 * x, train.params))

  class Failing:
    def write(self, line: Any) -> None:
      if line['step'] == 1_920:
        raise OSError('of my own')

    def close(self) -> None: ...

  config = podrace.configure('catch', **SMALL)
  whole = podrace.train(config, tmp_path / 'whole', [Shrink()], quiet=True)
  with pytest.raises(RunError, match='of my own'):
    podrace.train(config, tmp_path / 'run', [Shrink()], sinks=(Failing(),), quiet=True)
  result = podrace.train(config, tmp_path / 'run', [Shrink()], quiet=True)
  assert result.summary['params_sha256'] == whole.summary['params_sha256']


def test_a_callback_changes_what_is_learned(tmp_path: Path) -> None:
  class Zero:
    def __call__(self, line: Any) -> None: ...
    def transform(self, train: Any, line: Any) -> Any:
      return train._replace(params=jax.tree.map(lambda x: 0 * x, train.params))

  config = podrace.configure('catch', **SMALL)
  podrace.train(config, tmp_path / 'run', [Zero()], quiet=True)
  from podrace.run.saved_params import restore_params
  from podrace.settings.resolved import resolve

  _, params, _ = restore_params(resolve(config), tmp_path / 'run')

  # The checkpoint at the end has what the callback made of the last line.
  assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(params))


class Changing:
  """A callback that changes what is learned."""

  def __init__(self, change: Callable[[Any], Any]) -> None:
    self.change = change

  def __call__(self, line: Any) -> None: ...

  def transform(self, train: Any, line: Any) -> Any:
    return self.change(train)


@pytest.mark.parametrize(
  'change',
  [
    lambda train: jax.tree.map(lambda x: 0.5 * x, train),  # Adam's count is no float
    lambda train: train._replace(params=jax.tree.map(lambda x: x[None], train.params)),
    lambda train: train._replace(params=()),
  ],
)
def test_a_change_to_another_type_is_named_and_the_run_saved(change: Any, tmp_path: Path) -> None:
  config = podrace.configure('catch', **SMALL)
  with pytest.raises(RunError, match=r'Changing\.transform .*expected'):
    podrace.train(config, tmp_path / 'run', [Changing(change)], quiet=True)
  result = podrace.train(config, tmp_path / 'run', [Changing(lambda x: x)], quiet=True)
  assert result.summary['step'] == 6_400 and len(result.metrics) == 10


def test_a_change_may_have_one_array_twice(tmp_path: Path) -> None:
  """As a target network that is set to the parameters. The program donates both."""

  def change(train: Any) -> Any:
    return train._replace(rest=train.rest._replace(target=train.params.network))

  agent = DQN(
    QNetwork(hidden=(8,)), Buffer(capacity=512, batch_size=8, min_size=64, samples_per_insert=1.0)
  )
  config = podrace.configure('catch', **SMALL | dict(agent=agent, total_steps=1_920))
  result = podrace.train(config, tmp_path / 'run', [Changing(change)], quiet=True)
  assert result.summary['step'] >= 1_920


def test_a_change_under_sebulba_is_refused(tmp_path: Path) -> None:
  config = podrace.configure('catch', **SMALL, architecture='sebulba', lag='0')
  with pytest.raises(UsageError, match='anakin'):
    podrace.train(config, tmp_path / 'run', [Changing(lambda x: x)], quiet=True)


@pytest.mark.parametrize(
  'returned, message',
  [({'loss': 1.0}, 'loss'), ({'episode_x': 1.0}, 'episode_x'), ({'mine': 'much'}, "= 'much'")],
)
def test_what_callbacks_may_not_report(returned: Any, message: str) -> None:
  with pytest.raises(UsageError, match=message):
    Callbacks([lambda line: returned])({'step': 1, 'loss': 0.0})


def test_what_is_no_callback() -> None:
  with pytest.raises(UsageError, match='callback'):
    Callbacks([3])  # type: ignore[list-item]
  half = Counting()
  Callbacks([half])

  class Half:
    def __call__(self, line: Any) -> None: ...
    def state(self) -> Any: ...

  with pytest.raises(UsageError, match='Half'):
    Callbacks([Half()])


class Memory:
  """Changes what it has, in a way that a test names."""

  def __init__(self, change: str) -> None:
    self.change, self.lines, self.best = change, [], 0.0
    self.array = np.zeros(())

  def __call__(self, line: Any) -> None:
    self.changed(line)

  def changed(self, line: Any) -> None:
    if self.change == 'a number':
      self.best += 1.0
    elif self.change == 'a list':
      self.lines.append(line)
    elif self.change == 'a new one':
      self.other = line
    elif self.change == 'an array':
      self.array = self.array + 1
    else:
      self.best = float('0')  # another object, the same number


@pytest.mark.parametrize(
  'change, name',
  [('a number', 'best'), ('a list', 'lines'), ('a new one', 'other'), ('an array', 'array')],
)
@pytest.mark.parametrize('method', [False, True])
def test_a_memory_that_no_checkpoint_keeps_is_refused(change: str, name: str, method: bool) -> None:
  memory = Memory(change)
  callbacks = Callbacks([memory.changed if method else memory])
  message = (
    rf'Memory(.changed)? changes its attribute {name}, which no checkpoint keeps.*exact = False'
  )
  with pytest.raises(UsageError, match=message):
    callbacks({'step': 1})
  memory = Memory(change)
  memory.exact = False  # type: ignore[attr-defined]
  callbacks = Callbacks([memory.changed if method else memory])
  assert callbacks({'step': 1}) == callbacks({'step': 1}) == {'step': 1}


def test_what_needs_no_checkpoint() -> None:
  lines: list[Any] = []
  callbacks = Callbacks([Memory('nothing'), Counting(), lines.append, lambda line: None])
  assert callbacks({'step': 1}) == {'step': 1, 'my_lines': 1}


def test_a_memory_that_transform_has_is_refused_at_the_next_line() -> None:
  class Transforming(Memory):
    def __call__(self, line: Any) -> None: ...
    def transform(self, train: Any, line: Any) -> Any:
      self.changed(line)
      return train

  callbacks = Callbacks([Transforming('a number')])
  callbacks({'step': 1})
  callbacks.transforms[0](None, {'step': 1})
  with pytest.raises(UsageError, match=r'Transforming.*best'):
    callbacks({'step': 2})


def test_a_run_goes_on_with_the_callbacks_that_it_had(tmp_path: Path) -> None:
  class Another(Counting):
    def __call__(self, line: Any) -> Any:
      super().__call__(line)
      return {'another': self.lines}

  config = podrace.configure('catch', **SMALL)
  run = tmp_path / 'run'
  with pytest.raises(RunError, match='of my own'):
    podrace.train(config, run, [Counting(fail_at=5), Another()], quiet=True)
  for others in ([], [Counting()], [Another(), Counting()]):
    with pytest.raises(UsageError, match=r'Counting.*Another'):
      podrace.train(config, run, others, quiet=True)
  result = podrace.train(config, run, [Another(), Counting()], override=True, quiet=True)
  # Each has what it remembered, although their order is another one.
  last = result.metrics[-1]
  assert (last['my_lines'], last['another']) == (10, 9)  # the other one failed before it at line 5


def test_infinite_metrics_are_null() -> None:
  assert Callbacks([lambda line: {'mine': float('inf')}])({'step': 1}) == {'step': 1, 'mine': None}


# --- evaluation while training --------------------------------------------------------------------


EVALUATED = SMALL | dict(eval_every=1_920, eval_episodes=7)


@pytest.mark.parametrize(
  'architecture', ['anakin', pytest.param('sebulba', marks=pytest.mark.slow)]
)
def test_evaluations_are_those_of_podrace_eval_and_change_nothing(
  architecture: Any, tmp_path: Path
) -> None:
  config = podrace.configure('catch', **EVALUATED, architecture=architecture, lag='1')
  result = podrace.train(config, tmp_path / 'run', quiet=True)
  assert [line['step'] for line in result.evaluations] == [1_920, 3_840, 5_760, 6_400]
  last = result.evaluations[-1]
  found = result.evaluate(7, seed=config.seed)
  for name in ('episode_return_mean', 'episode_return_std', 'episodes', 'step'):
    assert last[name] == found[name]
  plain = dataclasses.replace(config, eval_every=0, eval_episodes=32)
  without = podrace.train(plain, tmp_path / 'plain', quiet=True)
  assert without.summary['params_sha256'] == result.summary['params_sha256']
  assert not (tmp_path / 'run/to-evaluate').exists()


@pytest.mark.slow
def test_evaluations_of_all_seeds(tmp_path: Path, several_seeds: None) -> None:
  config = podrace.configure('catch', **EVALUATED, seeds=2)
  result = podrace.train(config, tmp_path / 'run', quiet=True)
  assert all(len(line['episode_return_mean_by_seed']) == 2 for line in result.evaluations)
  assert result.evaluations[-1]['episodes'] == 14


def test_evaluations_that_a_killed_run_had_not_made_are_made_by_the_next_life(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  config = podrace.configure('catch', **EVALUATED)
  whole = podrace.train(config, tmp_path / 'whole', quiet=True)
  gate = threading.Event()

  def evaluate_never(params: Any, seed: int) -> None:
    gate.wait(60)
    raise ValueError

  with monkeypatch.context() as patch:  # a first life that gets to none
    patch.setattr(periodic_evaluation, 'make_returns', lambda *args: evaluate_never)
    patch.setattr(periodic_evaluation, 'CLOSE_SECONDS', 0.01)
    with pytest.raises(RunError, match='of my own'):
      podrace.train(config, tmp_path / 'run', [Counting(fail_at=7)], quiet=True)
  assert (tmp_path / 'run/eval.jsonl').read_text() == ''
  result = podrace.train(config, tmp_path / 'run', override=True, quiet=True)
  gate.set()
  names = ('step', 'episode_return_mean', 'episode_return_std')
  assert [[line[n] for n in names] for line in result.evaluations] == [
    [line[n] for n in names] for line in whole.evaluations
  ]


def test_an_evaluation_that_fails_ends_the_run(tmp_path: Path, monkeypatch: Patch) -> None:
  def fail(*args: Any) -> Any:
    raise ValueError('no such game')

  monkeypatch.setattr(periodic_evaluation, 'make_returns', fail)
  with pytest.raises(RunError, match='no such game'):
    podrace.train(podrace.configure('catch', **EVALUATED), tmp_path / 'run', quiet=True)


def test_processes_meet_after_the_last_evaluation(tmp_path: Path, monkeypatch: Patch) -> None:
  """JAX would end the one that evaluates, once the others have waited 30 s for it to leave."""
  did: list[str] = []

  def noted(owner: Any, name: str) -> None:
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: did.append(name) or plain(*args))

  noted(run, 'everyones')
  noted(Evaluations, 'finish')
  podrace.train(podrace.configure('catch', **EVALUATED), tmp_path / 'run', quiet=True)
  assert did[-2:] == ['finish', 'everyones']


def test_evaluations_are_filmed(tmp_path: Path) -> None:
  config = podrace.configure('catch', **EVALUATED | dict(eval_every=6_400), eval_video=True)
  podrace.train(config, tmp_path / 'run', quiet=True)
  assert (tmp_path / 'run/videos/6400-best.mp4').stat().st_size > 500


@pytest.mark.slow
def test_evaluations_in_another_environment(tmp_path: Path) -> None:
  """They are what `podrace eval --env` says; one with other spaces is found before there is a directory."""
  config = podrace.configure(
    env='podrace:maze,size=5,levels=1', agent='ppo', total_steps=4_096, num_envs=16, unroll_length=16, eval_every=4_096,
    eval_episodes=8, eval_env='podrace:maze,size=5,unseen=true',
  )  # fmt: skip
  result = podrace.train(config, tmp_path / 'run', quiet=True)
  here, there = (
    evaluate(tmp_path / 'run', 8, 0, ['greedy'], env=env)['episode_return_mean']
    for env in ('', config.eval_env)
  )
  assert result.evaluations[-1]['episode_return_mean'] == there != here
  for env, message in (
    ('podrace:maze,size=7', '--eval-env podrace:maze,size=7 has another observation space'),
    ('podrace:maze,unsen=true', 'unsen'),
  ):
    with pytest.raises((UsageError, UnknownName), match=message):
      podrace.train(dataclasses.replace(config, eval_env=env), tmp_path / 'other', quiet=True)
  assert not (tmp_path / 'other').exists()
  with pytest.raises(UsageError, match=r'--eval-env.*--eval-every'):
    podrace.train(dataclasses.replace(config, eval_every=0), tmp_path / 'other', quiet=True)


# --- a warm start ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(tmp_path: Path) -> None:
  first = podrace.train(
    podrace.configure('catch', total_steps=200_000, devices=1), tmp_path / 'first', quiet=True
  )
  config = podrace.configure('catch', **SMALL | dict(total_steps=640), init_from=str(first.run_dir))
  warm = podrace.train(config, tmp_path / 'warm', quiet=True)
  cold = podrace.train(dataclasses.replace(config, init_from=''), tmp_path / 'cold', quiet=True)
  assert first.evaluate(200)['episode_return_mean'] > 0.5
  assert warm.evaluate(200)['episode_return_mean'] > 0.3 > cold.evaluate(200)['episode_return_mean']


@pytest.mark.slow
def test_a_warm_start_of_all_seeds_and_of_target_networks(
  tmp_path: Path, several_seeds: None
) -> None:
  from podrace.run.build import build
  from podrace.run.warm_start import WarmStart

  settings: Any = SMALL | dict(total_steps=640)
  podrace.train(podrace.configure('catch', **settings, agent='dqn'), tmp_path / 'one', quiet=True)
  config = podrace.configure(
    'catch', **settings, agent='dqn', seeds=2, init_from=str(tmp_path / 'one')
  )
  program = build(config)
  program.compile()
  state = program.init(jax.vmap(jax.random.key)(np.arange(2, dtype=np.uint32)))
  warm = WarmStart(resolve(config)).apply(state)
  kernel = jax.tree.leaves(warm.train.params.network)[-1]
  assert (kernel[0] == kernel[1]).all()
  for a, b in zip(
    *map(jax.tree.leaves, (warm.train.params.network, warm.train.rest.target)), strict=True
  ):
    assert (a == b).all()
  assert (warm.train.params.epsilon == 1).all()


def test_a_warm_start_of_d4pg_values_the_policy_that_acts() -> None:
  config = podrace.configure(env='gymnax:Pendulum-v1', agent='d4pg')
  agent = resolve(config).agent
  init = jax.jit(agent.init)
  own, other = jax.device_get([init(jax.random.key(seed)) for seed in (0, 1)])
  warm = jax.device_get(agent.warm_start(own, other.params))
  for a, b, c in zip(
    *map(jax.tree.leaves, (warm.params, warm.rest.target.actor, other.params)), strict=True
  ):
    assert (a == b).all() and (b == c).all()
  for a, b in zip(
    *map(jax.tree.leaves, (warm.rest.target.critic, own.rest.target.critic)), strict=True
  ):
    assert (a == b).all()


@pytest.mark.slow
def test_a_run_with_a_target_network_goes_on_from_a_warm_start(tmp_path: Path) -> None:
  settings: Any = SMALL | dict(total_steps=640)
  config = podrace.configure('catch', **settings, agent='dqn')
  first = podrace.train(config, tmp_path / 'one', quiet=True)
  config = dataclasses.replace(config, init_from=str(first.run_dir))
  assert podrace.train(config, tmp_path / 'two', quiet=True).summary['step'] >= 640


def test_a_warm_start_with_other_shapes_is_refused(tmp_path: Path) -> None:
  podrace.train(podrace.configure('catch', **SMALL), tmp_path / 'one', quiet=True)
  config = podrace.configure(
    'catch', **SMALL, init_from=str(tmp_path / 'one'), agent={'network': {'hidden': (3,)}}
  )
  with pytest.raises(UsageError, match=r'(.|\n)*float32\[50, 64\] there, float32\[50, 3\] here'):
    podrace.train(config, tmp_path / 'two', quiet=True)
  missing = dataclasses.replace(config, init_from=str(tmp_path / 'none'))
  with pytest.raises(UsageError, match='run directory'):
    podrace.train(missing, tmp_path / 'three', quiet=True)
  assert not (tmp_path / 'two').exists() and not (tmp_path / 'three').exists()


def test_a_run_whose_checkpoints_are_gone_says_so(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  config = podrace.configure('catch', **SMALL)
  first = podrace.train(config, tmp_path / 'run', quiet=True)
  (tmp_path / 'run' / 'summary.json').unlink()
  for path in (tmp_path / 'run' / 'checkpoints').iterdir():
    shutil.rmtree(path)
  again = podrace.train(config, tmp_path / 'run', quiet=True)
  said = capsys.readouterr().err
  assert 'step 6,400' in said and 'step 0' in said
  assert again.summary['params_sha256'] == first.summary['params_sha256']


def test_what_importing_podrace_imports() -> None:
  code = 'import sys, podrace; podrace.Config; print(*{m.partition(".")[0] for m in sys.modules})'
  loaded = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert not {'jax', 'flax', 'matplotlib', 'pandas', 'optuna'} & set(loaded.stdout.split())


def test_metrics_of_no_run_are_empty(tmp_path: Path) -> None:
  assert metrics.read(tmp_path / 'eval.jsonl') == []
