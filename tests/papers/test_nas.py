"""Architecture search: masked networks and their training against NumPy, the cache, runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import types
from pathlib import Path
from typing import Any

import jax
import nas
import numpy as np
import pytest
from children import Process
from gymnasium.utils.env_checker import check_env
from matplotlib.figure import Figure
from resumes import assert_resumes_exactly
from shorthand import Patch

import podrace
from podrace.errors import UnknownName
from podrace.launch.program import Program

PAPERS = Path(nas.__file__).parent

GOOD = [5, 1, 1, 4, 2, 0, 0, 0, 0, 3, 2, 3, 1]  # a block is left out; the learning rate is 0.01
SQUARES = [0, 1, 0, 2, 3, 0, 2, 2, 2, 5, 1, 0, 1]


# --- networks -------------------------------------------------------------------------------------


def dense(weights: Any, choices: list[int], x: np.ndarray) -> np.ndarray:
  """The network with layers of their own sizes; padded sums only where widths differ."""
  functions = (lambda v: v, lambda v: np.maximum(v, 0), np.tanh, lambda v: 1 / (1 + np.exp(-v)))
  outputs = [x]
  for i in range(4):
    units, f, addition = choices[3 * i : 3 * i + 3]
    size, h = (0, 4, 8, 16, 32, 64)[units], outputs[-1]
    if size:
      kernel, bias = weights[0][i][: h.shape[1], :size], weights[1][i][:, :size]
      y = functions[f](h @ kernel + bias)
      if addition:
        other = outputs[addition - 1]
        width = max(size, other.shape[1])
        y = sum(np.pad(v, ((0, 0), (0, width - v.shape[1]))) for v in (y, other))
      h = y
    outputs.append(h)
  return outputs[-1] @ weights[2][: outputs[-1].shape[1]]


def random_weights(random: np.random.Generator) -> Any:
  shapes = (4, 64, 64), (4, 1, 64), (64, 10)
  return tuple(np.float32(random.normal(size=shape) / 8) for shape in shapes)


def test_a_masked_network_is_the_network_of_its_own_size() -> None:
  random, forward = np.random.default_rng(0), jax.jit(nas.forward)
  for _ in range(40):
    choices = [int(random.integers(n)) for n in nas.OPTIONS]
    weights, x = random_weights(random), np.float32(random.normal(size=(3, 64)))
    blocks = np.array(choices[:-1]).reshape(4, 3)
    expected = dense(weights, choices, x)
    np.testing.assert_allclose(forward(weights, blocks, x), expected, rtol=1e-4, atol=1e-4)


def test_the_space() -> None:
  assert nas.OPTIONS == (6, 4, 2, 6, 4, 3, 6, 4, 4, 6, 4, 5, 4)
  assert np.prod(nas.OPTIONS) > 1e8


def trained(choices: list[int], seed: int, data: Any) -> tuple[float, int]:
  """`fit` step by step: Adam in NumPy. Returns the last score, and the epochs."""
  x, target, x_valid, target_valid = data
  blocks, key = np.array(choices[:-1]).reshape(4, 3), jax.random.key(seed)
  loss = lambda w, x, y: nas.loss_and_score(nas.forward(w, blocks, x), y)[0]  # noqa: E731
  gradient = jax.jit(jax.grad(loss))
  kernels = np.array(jax.random.normal(jax.random.fold_in(key, 0), (5, 64, 64))) / 8
  weights: Any = [kernels[:4], np.zeros((4, 1, 64), np.float32), kernels[4, :, :10]]
  mean, square = [[np.zeros_like(w) for w in weights] for _ in range(2)]
  scores: list[float] = []
  rate, steps = (0.1, 0.01, 0.001, 0.0001)[choices[-1]], 0
  for epoch in range(1, 17):
    for rows in np.split(jax.random.permutation(jax.random.fold_in(key, epoch), 1024), 16):
      steps += 1
      for i, g in enumerate(map(np.array, gradient(tuple(weights), x[rows], target[rows]))):
        mean[i], square[i] = 0.9 * mean[i] + 0.1 * g, 0.999 * square[i] + 0.001 * g**2
        root = np.sqrt(square[i] / (1 - 0.999**steps)) + 1e-8
        weights[i] = np.float32(weights[i] - rate * mean[i] / (1 - 0.9**steps) / root)
    y = dense(weights, choices, x_valid)
    scores.append(float(np.mean(y.argmax(1) == target_valid)))
    if epoch > 2 and max(scores[-2:]) <= max(scores[:-2]):
      break
  return scores[-1], len(scores)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('choices', 'ends_early', 'least'),
  [(GOOD, True, 0.9), ([1, 0, 1, 0, 0, 1, 2, 0, 2, 5, 3, 0, 3], False, 0.3)],  # slow, with pauses
)
def test_training_ends_early_with_the_last_score(
  choices: list[int], ends_early: bool, least: float
) -> None:
  data = nas.load('digits')
  expected, epochs = trained(choices, 3, data)
  assert epochs >= 3 and (epochs < 16) == ends_early
  score = float(nas.fit(np.int32(choices), 3, *data))
  assert score == pytest.approx(expected, abs=0.012)  # rounding: six of 512 digits
  assert least < score < 1


def test_the_polynomial() -> None:
  x, target, *_ = data = nas.load('polynomial')
  np.testing.assert_allclose(target, 10 / 3 - np.sum(x**2, axis=1), rtol=1e-3, atol=1e-4)
  assert not x[:, 10:].any()
  scores = [
    float(nas.fit(np.int32(choices), 0, *data)) for choices in (SQUARES, [*SQUARES[:-1], 3])
  ]
  assert scores[0] > 0.5 > 0.2 > scores[1]


# --- evaluations and environment ------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: Patch) -> list[list[int]]:
  """Replaces training by scores of the first choice; returns the trained architectures."""
  calls: list[list[int]] = []

  def fit(choices: np.ndarray, seed: int, *data: Any) -> float:
    calls.append(choices.tolist())
    return (0.25, float('nan'), -7.0, 0.5, 0.5, 0.5)[choices[0]]

  monkeypatch.setattr(nas, 'fit', fit)
  return calls


def log(folder: Path) -> list[dict[str, Any]]:
  (path,) = folder.glob('log-*.jsonl')
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_architecture_is_trained_once(tmp_path: Path, table: list[list[int]]) -> None:
  for first, score in ((0, 0.25), (1, -1.0), (2, -1.0)):
    choices = [first, *GOOD[1:]]
    assert [nas.evaluate('digits', choices, str(tmp_path)) for _ in range(2)] == [score, score]
  assert table == [[first, *GOOD[1:]] for first in range(3)]
  assert [row['cached'] for row in log(tmp_path)] == [False, True] * 3


def test_a_file_is_whole_or_missing(
  tmp_path: Path, monkeypatch: Patch, table: list[list[int]]
) -> None:
  def fail(*paths: Any) -> None:
    raise OSError('killed')

  with monkeypatch.context() as patch, pytest.raises(OSError, match='killed'):
    patch.setattr('os.replace', fail)
    nas.evaluate('digits', GOOD, str(tmp_path))
  assert not list(tmp_path.glob('*.json'))
  assert nas.evaluate('digits', GOOD, str(tmp_path)) == 0.5
  assert table == [GOOD, GOOD]


def test_an_episode_is_an_architecture(tmp_path: Path, table: list[list[int]]) -> None:
  env = nas.Architecture(folder=str(tmp_path))
  check_env(env, skip_render_check=True)
  observation, _ = env.reset()
  for i, (choice, options) in enumerate(zip(GOOD, nas.OPTIONS, strict=True)):
    assert observation['decision'] == i
    assert observation['choice'] == (GOOD[i - 1] if i else 6)
    assert observation['action_mask'].tolist() == [k < options for k in range(6)]
    observation, reward, terminated, truncated, _ = env.step(np.int64(choice))
    assert terminated == (i == 12) and not truncated
    assert reward == (0.5 if terminated else 0.0)
  assert table[-1] == GOOD and observation['action_mask'].all()


def test_without_scikit_learn_the_digits_are_refused(monkeypatch: Patch) -> None:
  find = importlib.util.find_spec
  monkeypatch.setattr('importlib.util.find_spec', lambda x: None if x == 'sklearn' else find(x))
  with pytest.raises(UnknownName, match='the digits are in scikit-learn: pip install'):
    podrace.configure(env='gymnasium:nas:Architecture-v0')
  assert nas.Architecture('polynomial').reset()[0]['decision'] == 0


# --- runs -----------------------------------------------------------------------------------------


def test_random_search(monkeypatch: Patch, table: list[list[int]]) -> None:
  """The first evaluation takes 1000 s, the others 1 s each, with pauses of 1 s."""
  clock = itertools.chain((0, 1000), itertools.count(1001))
  monkeypatch.setattr(nas, 'time', types.SimpleNamespace(time=lambda: next(clock)))
  result = nas.search('random search', 0, 200, 'polynomial')
  assert result['best'] == result['bests'][-1] == 0.5 and result['cached'] == 0
  assert len(result['means']) == len(result['bests']) == 4
  assert result['last'] == pytest.approx(np.mean(result['means'][2:]), abs=1e-4)
  assert result['busy'] == 0.5
  results = {m: dict.fromkeys(range(3), result) for m in ('random search', *nas.METHODS)}
  nas.draw(results, figure := Figure())
  assert [axes.get_xlabel() for axes in figure.axes] == ['evaluations', 'evaluations', '']


@pytest.mark.slow
def test_ppo_learns_on_two_devices_and_resumes_exactly(tmp_path: Path) -> None:
  """A score is the share of 13 choices that are right: 0.25 by chance."""
  env = f'gymnasium:nas_table:Architecture-v0,task=polynomial,folder={tmp_path}'
  sizes: dict[str, Any] = dict(num_envs=4, env_threads=1, devices=3, log_every=80 * 14)
  config = nas.configuration('PPO', env, total_steps=240 * 14, **sizes)
  config = dataclasses.replace(config, actor_devices='0', learner_devices='1,2')
  agent = dataclasses.replace(config.agent, anneal_learning_rate=False, learning_rate=0.01)
  config = dataclasses.replace(config, agent=agent)
  whole = assert_resumes_exactly(config, 80 * 14, tmp_path)
  returns = [line['episode_return'] for line in whole.metrics]
  assert returns[0] < 0.4 < 0.5 < returns[-1]


def test_the_program_has_the_controller_of_the_table() -> None:
  program: Program = nas.program('runs/{mine}', 100)
  learner, workers = program.order()
  words = ' '.join(learner.command)
  config = nas.configuration('IMPALA', 'gymnasium:nas:Architecture-v0', total_steps=1)
  network = config.agent.network
  for flag in (
    f'learning-rate {config.agent.learning_rate}', 'discount 1 ', f'network.core {network.core}',
    f'network.core-size {network.core_size}', f'network.hidden {network.hidden[0]}',
  ):  # fmt: skip
    assert f'--agent.{flag}' in words
  assert 'folder=runs/{{mine}}/evaluations' in words and '--total-steps 1400 ' in words
  assert (learner.main, workers.replicas, workers.name) == (True, 4, 'worker')


@pytest.mark.slow
def test_a_learner_and_workers_as_a_program(tmp_path: Path, monkeypatch: Patch) -> None:
  code = (
    'import sys, nas, podrace.launch; program = nas.program(sys.argv[1], 100, "polynomial"); '
    'sys.exit(podrace.launch.run(program, sys.argv[1]))'
  )
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  monkeypatch.chdir(PAPERS)
  with Process(tmp_path / 'said.txt', '-c', code, str(tmp_path / 'run')) as program:
    assert program.wait(240) == 0, program.output
  assert json.loads((tmp_path / 'run' / 'summary.json').read_text())['step'] >= 1400
  logs = list((tmp_path / 'run' / 'evaluations' / 'polynomial').glob('log-*.jsonl'))
  assert len(logs) >= 4
  assert sum(len(path.read_text().splitlines()) for path in logs) >= 100
