"""What is said of wrong Gymnasium environments of one's own, before a run and in it."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from shorthand import slow_after

from podrace import cli
from podrace.envs.host import base as host
from podrace.envs.host import checker
from podrace.envs.host.base import PoolArgs
from podrace.envs.host.gymnasium import allowed_action
from podrace.errors import HostError, UnknownName, UsageError

DOCK = """\
import gymnasium, numpy as np
class Dock(gymnasium.Env):
  observation_space = gymnasium.spaces.Box(-5.0, 5.0, (2,), np.float32)
  action_space = gymnasium.spaces.Discrete(3)
  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.x = self.np_random.uniform(-2, 2)
    self.time = 0
    return self.observe(), {}
  def observe(self):
    return np.array([self.x, 0], np.float32)
  def step(self, action):
    self.time += 1
    return self.observe(), 1.0, self.x > 4.5, False, {}
gymnasium.register('Dock-v0', entry_point=Dock, max_episode_steps=40)
"""
NAME = 'gymnasium:dock:Dock-v0'
STEP, RESET = 'dock.Dock.step (dock.py:12)', 'dock.Dock.reset (dock.py:5)'
RETURNS = 'self.observe(), 1.0, self.x > 4.5, False, {}'
OBSERVES = 'np.array([self.x, 0], np.float32)'
REGISTERS = "gymnasium.register('Dock-v0', entry_point=Dock, max_episode_steps=40)"
IN_STEP = 'self.time += 1'
TAKES = 'self, *, seed=None, options=None)'
RETURNED = '(observation, reward, terminated, truncated, info)'

Change = tuple[str, str]
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
  """Writes dock.py, with changes, where it is imported."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)

  def changed(*changes: Change) -> None:
    text = DOCK
    for before, after in changes:
      assert before in text
      text = text.replace(before, after)
    (tmp_path / 'dock.py').write_text(text)

  yield changed
  sys.modules.pop('dock', None)
  gymnasium.registry.pop('Dock-v0', None)


def tried(deadline: float = 30.0) -> str:
  """What is said in the trial before a run."""
  spec = host.make(NAME)
  assert spec.try_out is not None
  with pytest.raises(UsageError) as told:
    spec.try_out(deadline)
  return str(told.value)


def played(steps: int = 20, deadline: float = 30.0, threads: int = 1) -> list[Any]:
  """What a pool without a trial gives."""
  spec = host.make(NAME)
  check, found = checker.Checker(spec, 2), []
  with contextlib.closing(
    spec.make(PoolArgs(2, 2, np.arange(2, dtype=np.uint32), threads, deadline))
  ) as pool:
    pool.reset()
    for _ in range(steps):
      found.append(pool.recv())
      check(found[-1])
      pool.send(np.arange(2), np.zeros(2, np.int32))
  return found


# --- before a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('change', 'place', 'parts'),
  slow_after(
    8,
    ((OBSERVES, 'np.array([1e300, 0])'), RESET, ['[1.e+300 0.e+000]', 'numbers that float32 has']),
    ((RETURNS, 'self.observe(), 1.0, False, {}'), STEP, [' 4', RETURNED]),
    (('return self.observe(), {}', 'return self.observe()'), RESET, ['float32[2]', 'info)']),
    ((f'{TAKES}:\n    super().reset(seed=seed)', 'self):'), RESET, ['()', f'({TAKES}', "'seed'"]),
    ((OBSERVES, 'np.ones(3, np.float32)'), RESET, ['observation float32[3]', 'float32[2]']),
    ((' 1.0,', ' None,'), STEP, ['reward None']),
    (('self.x > 4.5', '0.17'), STEP, ['terminated 0.17', 'True or False']),
    ((' 1.0,', ' np.nan,'), STEP, [NAME, 'reward', '[0]', 'NaN']),
    ((RETURNS, 'None'), STEP, ['None', RETURNED]),
    ((OBSERVES, 'dict(x=self.x)'), RESET, ["observation {'x': "]),
    ((OBSERVES, 'np.array([1, 0])'), RESET, ['observation int64[2]', 'float32[2]']),
    ((OBSERVES, '[[1.0], [1.0, 2.0]]'), RESET, ['[[1.0], [1.0, 2.0]]', 'float32[2]']),
    ((' 1.0,', ' "1.0",'), STEP, ["reward '1.0'"]),
    ((' 1.0,', ' np.ones(2),'), STEP, ['reward float64[2]']),
    (('False, {}', '"no", {}'), STEP, ["truncated 'no'", 'True or False']),
    (('False, {}', 'None, {}'), STEP, ['truncated None', 'True or False']),
    (('False, {}', 'False, []'), STEP, ['info []', 'dict']),
  ),
)
def test_a_trial_names_what_is_returned_and_what_is_expected(
  change: Change, place: str, parts: list[str], write: Write
) -> None:
  write(change)
  told = tried()
  assert told.startswith(place) and '\n' not in told
  assert [part for part in parts if part not in told] == [], told


@pytest.mark.parametrize(
  ('change', 'head', 'line'),
  [
    ((IN_STEP, '1 / 0'), STEP, 'line 13, in step'),
    (('super().reset(seed=seed)', '1 / 0'), RESET, 'line 6, in reset'),
  ],
)
def test_exceptions_are_told_with_the_users_lines_only(
  change: Change, head: str, line: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
  write(change)
  told = tried()
  assert told.startswith(head) and line in told and 'ZeroDivisionError' in told
  assert told.count('  File "') == 1
  monkeypatch.setenv('PODRACE_TRACEBACK', '1')
  assert 'gymnasium/wrappers' in tried()


@pytest.mark.parametrize(
  ('code', 'deadline', 'reason'),
  [
    ('import signal; signal.pause()', 0.5, '0.5 s'),
    ('import os; os._exit(3)', 30.0, 'exit code 3'),
  ],
)
def test_a_trial_has_an_end(code: str, deadline: float, reason: str, write: Write) -> None:
  write((IN_STEP, code))
  message = tried(deadline)
  assert message.startswith(STEP) and message.endswith(reason)


def test_the_command_line_ends_before_it_starts_workers(
  write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  write((IN_STEP, 'raise ValueError("boom")'))
  args = ['--agent', 'impala', '--env', NAME, '--num-envs', '24', '--total-steps', '1000']
  with pytest.raises(SystemExit) as end:
    cli.main(['train', *args, '--run-dir', str(tmp_path / 'run'), '--quiet'])
  told = capfd.readouterr().err
  assert end.value.code == 2
  assert told.startswith(f'podrace: {STEP} ') and len(told.splitlines()) < 9


def test_envs_tries_an_environment_before_it_connects(
  write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
  write((RETURNS, '1'))
  with pytest.raises(SystemExit) as end:
    cli.main(['envs', '--connect', 'tcp://127.0.0.1:1', '--env', NAME])
  assert end.value.code == 2
  assert STEP in capfd.readouterr().err


@pytest.mark.parametrize(
  'change',
  [
    (OBSERVES, 'np.array([self.x, 0])'),  # float64
    (' 1.0,', ' np.array(1.0),'),
    ('self, *, seed=None, options=None', 'self, **given'),
    *(
      pytest.param(x, marks=pytest.mark.slow)
      for x in (
        (OBSERVES, '[self.x, 0.0]'),
        (' 1.0,', ' np.float32(1),'),
        (' 1.0,', ' 1,'),
        ('self.x > 4.5', 'np.array(False)'),
        ('self.x > 4.5', '0'),
      )
    ),
  ],
)
def test_what_is_only_written_otherwise_is_good(change: Change, write: Write) -> None:
  write(change, *([('seed=seed', 'seed=given["seed"]')] if 'given' in change[1] else []))
  spec = host.make(NAME)
  assert spec.try_out is not None
  spec.try_out(30)
  assert len(played(3)) == 3


def test_wrappers_are_tried_as_well(write: Write) -> None:
  """And named, where it is they who are wrong."""
  wrapper = """class Around(gymnasium.Wrapper):
  def step(self, action):
    return self.env.step(action)[:4]
gymnasium.register('Dock-v0', entry_point=lambda: Around(Dock()), max_episode_steps=40)"""
  write((REGISTERS, wrapper))
  told = tried()
  assert told.startswith('dock.Around.step (dock.py:16) ') and told.endswith(RETURNED)


def test_environments_that_allow_few_actions_are_given_one() -> None:
  """As in a run, which looks at action_mask."""
  for name in ('Masked-v0', 'Switches-v0', 'Trees-v0', 'Counts-v0'):
    spec = host.make(f'gymnasium:host_envs:{name}')
    assert spec.try_out is not None
    spec.try_out(30)


@pytest.mark.parametrize(
  ('space', 'mask', 'action'),
  [
    (spaces.Discrete(3), [0, 0, 1], 2),
    (spaces.Discrete(3), None, 0),
    (spaces.MultiDiscrete([2, 3]), [0, 1, 0, 0, 1], [1, 2]),
    (spaces.MultiDiscrete([2, 3]), None, [0, 0]),
    (spaces.MultiBinary(2), None, [0, 0]),
    (spaces.MultiBinary(2), [0, 1, 1, 0], [1, 0]),
    (spaces.Box(1, 2, (2,)), None, [1, 1]),
    (spaces.Box(-np.inf, np.inf, ()), None, 0),
  ],
)
def test_the_action_of_a_trial(space: Any, mask: list[int] | None, action: Any) -> None:
  observation = None if mask is None else dict(action_mask=np.array([mask], np.int8))
  found = allowed_action(space, observation)
  assert found.shape == (1, *space.shape) and found.dtype == space.dtype
  np.testing.assert_array_equal(found[0], action)


def test_gymnasiums_own_are_not_tried() -> None:
  """Which takes half a second."""
  assert host.make('gymnasium:CartPole-v1').try_out is None
  assert host.make('envpool:CartPole-v1').try_out is None


# --- in a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('value', 'part'),
  [
    ('(self.observe(), 1.0, False, {})', RETURNED),
    ('(self.observe()[:1], 1.0, False, False, {})', 'observation float32[1]'),
    ('(self.observe(), None, False, False, {})', 'reward None'),
    ('(self.observe(), 1.0, 0.2, False, {})', 'terminated 0.2'),
    ('1 / 0', 'ZeroDivisionError'),
  ],
)
def test_what_is_wrong_later_is_named_as_well(value: str, part: str, write: Write) -> None:
  write((f'return {RETURNS}', f'return {value} if self.time > 5 else ({RETURNS})'))
  with pytest.raises(HostError) as told:
    played()
  assert str(told.value).startswith(f'{STEP} ') and part in str(told.value)


@pytest.mark.parametrize('what', ['import os; os._exit(3)', 'import signal; signal.pause()'])
def test_workers_that_never_step_are_given_up_soon(what: str, write: Write) -> None:
  write((IN_STEP, what))
  start = time.monotonic()
  with pytest.raises(HostError, match='2 workers'):
    played(deadline=0.5, threads=2)
  assert time.monotonic() - start < 30


@pytest.mark.parametrize(
  ('change', 'times'),
  [
    ((OBSERVES, 'np.array([100 * self.x, 0], np.float32)'), 1),
    ((OBSERVES, 'np.array([5.01, 0], np.float32)'), 0),
    (('-5.0, 5.0', '-np.inf, np.inf'), 0),
  ],
)
def test_observations_outside_of_their_box_are_told_once(
  change: Change, times: int, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
  write(change)
  spec = host.make(NAME)
  assert spec.try_out is not None
  with caplog.at_level(logging.WARNING, 'podrace'):
    spec.try_out(30)
    check = checker.Checker(spec, 2)
    with contextlib.closing(
      spec.make(PoolArgs(2, 2, np.arange(2, dtype=np.uint32), 1, 30.0))
    ) as pool:
      pool.reset()
      check(pool.recv())
  assert caplog.text.count('Box(-5.0, 5.0, (2,), float32)') == times


def test_workers_print_no_warnings(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
  write((OBSERVES, 'np.array([100 * self.x, 0])'), ('self.x > 4.5', '0'))
  spec = host.make(NAME)
  assert spec.try_out is not None
  spec.try_out(30)
  played(3)
  assert 'WARN' not in capfd.readouterr().err


# --- names and modules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (('def step(self, action):', 'def step(self, action)'), ['dock.py:12: SyntaxError']),
    (('import gymnasium, numpy as np', 'import gymnasium'), ['dock.py:3: NameError', "'np'"]),
    (('numpy as np', 'numpy as np, nomodule'), ['dock.py:1: ModuleNotFoundError', "'nomodule'"]),
    ((REGISTERS, ''), ["'Dock-v0'", "'dock'"]),
    (("register('Dock-v0'", "register('Docks-v0'"), ["'dock:Dock-v0'", 'nearest: dock:Docks-v0']),
    (
      ('def reset(', 'def __init__(self):\n    self.size = 1 / 0\n  def reset('),
      [NAME, '  File "', 'ZeroDivisionError'],
    ),
    (('observation_space =', 'obs_space ='), [NAME, 'observation space']),
    (('  def reset(', '  def __init__(self, size):\n    pass\n  def reset('), [NAME, "'size'"]),
  ],
)
def test_a_wrong_module_is_explained(changes: Change, message: list[str], write: Write) -> None:
  write(changes)
  with pytest.raises(ValueError) as told:
    host.make(NAME)
  gymnasium.registry.pop('Docks-v0', None)
  assert [part for part in message if part not in str(told.value)] == [], told.value
  assert 'importlib' not in str(told.value) and 'site-packages' not in str(told.value)


def test_an_id_alone_hints_at_ones_own_module() -> None:
  with pytest.raises(UnknownName, match='gymnasium:MODULE:Dock-v0'):
    host.make('gymnasium:Dock-v0')
