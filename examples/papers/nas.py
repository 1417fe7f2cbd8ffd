"""Reinforcement learning for neural architecture search (Balaprakash et al. 2019, arXiv 1909.00311).

An episode is an architecture, a step is a choice c_k, and the last step pays the validation score R of the trained network. A
recurrent controller pi(c_k | c_<k) maximises E[R(c_1 ... c_K)] by PPO or IMPALA, for workers that train the networks. If it waits
for all workers (A2C), they wait for the slowest. Asynchronously (A3C) each gets its next choices at once. A network has four dense
blocks. A block of 0 units is left out; else it adds the output h_j of an earlier block, or nothing:

    h_i = mask_i * f_i(h_{i-1} W_i + b_i) + h_{j_i}       mask_i is 1 for the first units, 0 for the rest

All have the shapes of the largest, so one compiled program trains any of them. As in DeepHyper, training ends early, scores are
cached by the choices, each architecture has one seed, and a failed one scores -1. Deviations: one learner; V-trace for A3C; no
projection of added layers; observations are one-hot, of the decision and the last choice. In this directory, with scikit-learn:

    python nas.py; python nas.py launch runs/nas    # a table; a learner and four processes of environments
    podrace train --env gymnasium:nas:Architecture-v0 --agent ppo --agent.discount 1 --agent.network.core lstm \
      --agent.minibatches 1 --num-envs 4 --unroll-length 14 --total-steps 14000 --actor-threads 1
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
import zlib
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium.spaces import Dict, Discrete, MultiBinary
from scipy.special import stdtrit

WORKERS, EVALUATIONS, WIDTH, BLOCKS, BATCH, EPOCHS, PATIENCE = 4, 1000, 64, 4, 64, 16, 2
UNITS, RATES = np.array([0, 4, 8, 16, 32, 64]), np.float32([1e-1, 1e-2, 1e-3, 1e-4])
ACTIVATIONS = (lambda x: x, jax.nn.relu, jnp.tanh, jax.nn.sigmoid)
# Options of each decision: units, activation and addition of block 1, and so on; the learning rate.
OPTIONS = *(n for i in range(BLOCKS) for n in (len(UNITS), len(ACTIVATIONS), i + 2)), len(RATES)
MOST, EPISODE, CLASSES, FAILED = max(OPTIONS), len(OPTIONS) + 1, 10, -1.0  # + 1: the reset


def forward(weights: Any, blocks: Any, x: Any) -> Any:
  """Returns outputs [B, CLASSES] for inputs [B, WIDTH]. `blocks` [BLOCKS, 3] are choices."""
  h = [x]
  for kernel, bias, (units, f, addition) in zip(weights[0], weights[1], blocks, strict=True):
    y = jnp.stack([activation(h[-1] @ kernel + bias) for activation in ACTIVATIONS])[f]
    added = sum((addition == j + 1) * earlier for j, earlier in enumerate(h))
    mask = jnp.arange(WIDTH)[None] < jnp.asarray(UNITS)[units]
    h.append(jnp.where(units == 0, h[-1], mask * y + added))
  return h[-1] @ weights[2]


def loss_and_score(y: Any, target: Any) -> tuple[Any, Any]:
  if target.dtype == jnp.int32:
    loss = optax.softmax_cross_entropy_with_integer_labels(y, target).mean()
    return loss, jnp.mean(y.argmax(-1) == target)
  loss = jnp.mean(jnp.square(y[:, 0] - target))
  return loss, 1 - loss / jnp.var(target)


@functools.partial(jax.jit, compiler_options={'xla_cpu_multi_thread_eigen': False})  # one thread
def fit(choices: Any, seed: Any, x: Any, target: Any, x_valid: Any, target_valid: Any) -> Any:
  """Trains by Adam until the validation score has not risen for some epochs. Returns the last."""
  blocks, key = choices[:-1].reshape(BLOCKS, 3), jax.random.key(seed)
  optimizer = optax.adam(jnp.asarray(RATES)[choices[-1]])

  def step(state: Any, rows: Any) -> Any:
    loss = lambda weights: loss_and_score(forward(weights, blocks, x[rows]), target[rows])[0]  # noqa: E731
    updates, opt_state = optimizer.update(jax.grad(loss)(state[0]), state[1])
    return (optax.apply_updates(state[0], updates), opt_state), None

  def epoch(carry: Any) -> Any:
    state, n, best, waited, _ = carry
    order = jax.random.permutation(jax.random.fold_in(key, n + 1), len(x))
    state, _ = jax.lax.scan(step, state, order.reshape(-1, BATCH))
    score = loss_and_score(forward(state[0], blocks, x_valid), target_valid)[1]
    return state, n + 1, jnp.maximum(best, score), jnp.where(score > best, 0, waited + 1), score

  kernels = jax.random.normal(jax.random.fold_in(key, 0), (BLOCKS + 1, WIDTH, WIDTH)) / WIDTH**0.5
  weights = kernels[:-1], jnp.zeros((BLOCKS, 1, WIDTH)), kernels[-1, :, :CLASSES]
  start = ((weights, optimizer.init(weights)), 0, -jnp.inf, 0, -jnp.inf)
  return jax.lax.while_loop(lambda c: (c[1] < EPOCHS) & (c[3] < PATIENCE), epoch, start)[-1]


@functools.cache
def load(task: str) -> tuple[np.ndarray, ...]:
  """Returns inputs [N, WIDTH] and targets [N] for training, and then for validation."""
  random = np.random.default_rng(0)
  if task == 'digits':  # read from scikit-learn's file, as each worker would import it for seconds
    package = importlib.util.find_spec('sklearn').submodule_search_locations[0]
    table = random.permutation(np.loadtxt(f'{package}/datasets/data/digits.csv.gz', delimiter=','))
    x, target = table[:, :64] / 16 - 0.5, np.int32(table[:, 64])
  else:  # y = -sum_i x_i^2 of ten numbers, as in DeepHyper's documentation, plus its mean
    x = random.uniform(-1, 1, (1536, WIDTH)) * (np.arange(WIDTH) < 10)
    target = np.float32(10 / 3 - np.sum(x**2, axis=1))
  return np.float32(x[:1024]), target[:1024], np.float32(x[1024:1536]), target[1024:1536]


def evaluate(task: str, choices: list[int], folder: str) -> float:
  """Returns the score. Workers share scores by files, and each logs its evaluations."""
  began, path = time.time(), pathlib.Path(folder, f'{"-".join(map(str, choices))}.json')
  path.parent.mkdir(parents=True, exist_ok=True)
  if not (cached := path.exists()):
    score = float(fit(np.int32(choices), zlib.crc32(bytes(choices)) % 2**31, *load(task)))
    part = path.with_suffix(f'.{os.getpid()}')
    part.write_text(json.dumps(max(score, FAILED) if np.isfinite(score) else FAILED))
    os.replace(part, path)  # other workers see the whole file or none
  line = dict(score=json.loads(path.read_text()), cached=cached, began=began, ended=time.time())
  with path.with_name(f'log-{os.getpid()}.jsonl').open('a') as file:
    file.write(json.dumps(line) + '\n')
  return float(line['score'])


class Architecture(gymnasium.Env):
  """An episode makes the choices of an architecture. Its last step pays the validation score."""

  action_space = Discrete(MOST)
  observation_space = Dict(  # choice: the last one; MOST: none
    decision=Discrete(EPISODE), choice=Discrete(MOST + 1), action_mask=MultiBinary(MOST)
  )

  def __init__(self, task: str = 'digits', folder: str = 'runs/nas-evaluations') -> None:
    if task == 'digits' and importlib.util.find_spec('sklearn') is None:
      raise ImportError('the digits are in scikit-learn: pip install scikit-learn')
    self._task, self._folder, self._choices = task, os.path.join(folder, task), list[int]()

  def _observation(self) -> dict[str, Any]:
    decision, choice = len(self._choices), [MOST, *self._choices][-1]
    allowed = np.arange(MOST) < [*OPTIONS, MOST][decision]
    return dict(decision=decision, choice=choice, action_mask=allowed.astype(np.int8))

  def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
    super().reset(seed=seed)
    self._choices = []
    return self._observation(), {}

  def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    self._choices.append(int(action))
    if len(self._choices) < len(OPTIONS):
      return self._observation(), 0.0, False, False, {}
    jax.config.update('jax_platforms', 'cpu')  # a worker leaves accelerators to the learner
    return self._observation(), evaluate(self._task, self._choices, self._folder), True, False, {}


if 'Architecture-v0' not in gymnasium.registry:
  gymnasium.register('Architecture-v0', entry_point=Architecture)

METHODS: dict[str, Any] = {  # changes of the agent, and of the run
  'PPO': ('ppo', dict(learning_rate=0.003, minibatches=1, normalize_rewards=False), dict(lag='0')),
  'IMPALA': ('impala', dict(learning_rate=0.01), dict(lag='0')),
  'IMPALA, asynchronous': ('impala', dict(learning_rate=0.01), dict(lag='async', env_batch_size=1)),
}


def configuration(method: str, env: str, **settings: Any) -> Any:
  from podrace import configure  # here, as workers import this file too

  name, changes, run = METHODS[method]
  agent = configure(env=env, agent=name).agent
  network = dataclasses.replace(agent.network, hidden=(32,), core='lstm', core_size=32)
  agent = dataclasses.replace(agent, network=network, discount=1.0, **changes)
  sizes = dict(num_envs=WORKERS, env_threads=WORKERS, actor_threads=1, actor_groups=1, devices=1)
  return configure(env=env, agent=agent, unroll_length=EPISODE, **(sizes | run | settings))


def program(run_dir: str, evaluations: int = EVALUATIONS, task: str = 'digits') -> Any:
  """Returns an asynchronous search: a learner that acts, and workers."""
  from podrace.launch.program import Node, Program, literal

  env = literal(f'gymnasium:nas:Architecture-v0,task={task},folder={run_dir}/evaluations')
  flags = (
    f'--agent impala --agent.learning-rate 0.01 --agent.discount 1 --agent.network.hidden 32 --agent.network.core lstm '
    f'--agent.network.core-size 32 --num-envs {WORKERS} --actor-threads 1 --devices 1 --unroll-length {EPISODE} '
    f'--total-steps {evaluations * EPISODE} --envs remote --lag async --listen {{listen}} --announce {{announce}}'
  )
  learner = 'podrace', 'train', '--env', env, *flags.split(), '--run-dir', literal(run_dir)
  worker = Node('worker', ('podrace', 'envs', '--connect', '{learner}', '--env', env), WORKERS)
  return Program((Node('learner', learner, listens=('envs',), main=True), worker))


def search(method: str, seed: int, evaluations: int, task: str = 'digits') -> dict[str, Any]:
  """Returns means of 50 scores, best scores, and the share of time that workers evaluate."""
  with tempfile.TemporaryDirectory() as folder:
    if method == 'random search':
      random = np.random.default_rng(seed)
      for _ in range(evaluations):
        evaluate(task, [int(random.integers(n)) for n in OPTIONS], f'{folder}/{task}')
    else:
      from podrace import train

      env = f'gymnasium:nas:Architecture-v0,task={task},folder={folder}'
      config = configuration(method, env, seed=seed, total_steps=evaluations * EPISODE)
      train(config, f'{folder}/run', quiet=True)
    paths = pathlib.Path(folder, task).glob('log-*')
    logs = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
  logs = sorted(logs, key=lambda log: log[0]['began'])[-WORKERS:]  # without the trial's
  rows = sorted((row for log in logs for row in log), key=lambda row: row['ended'])[:evaluations]
  start = max(log[0]['ended'] for log in logs)  # all have compiled the program
  busy = sum(row['ended'] - row['began'] for row in rows if row['began'] >= start)
  busy /= len(logs) * (rows[-1]['ended'] - start)
  scores = np.array([row['score'] for row in rows]).reshape(-1, 50)
  last, means = scores[-2:].mean(), scores.mean(axis=1)
  bests, cached = np.maximum.accumulate(scores.max(axis=1)), sum(row['cached'] for row in rows)
  numbers = dict(last=last, best=bests[-1], cached=cached, busy=busy, means=means, bests=bests)
  return {name: np.round(x, 4).tolist() for name, x in numbers.items()}


def measure(seeds: Any) -> dict[str, Any]:
  return {m: {s: search(m, s, EVALUATIONS) for s in seeds} for m in ('random search', *METHODS)}


def interval(x: Any) -> tuple[Any, Any]:  # means over runs, and halves of their 95% intervals
  return np.mean(x, 0), stdtrit(len(x) - 1, 0.975) * np.std(x, 0, ddof=1) / len(x) ** 0.5


def draw(results: dict[str, Any], figure: Any) -> None:
  figure.set_size_inches(10, 3.2)
  mean, best, share = figure.subplots(1, 3)
  for (method, runs), color in zip(results.items(), ('0.5', 'C0', 'C1', 'C3'), strict=True):
    for axes, key in (mean, 'means'), (best, 'bests'):
      y, half = interval([run[key] for run in runs.values()])
      x = np.arange(50, 50 * len(y) + 1, 50)
      axes.plot(x, y, color=color, label=method)
      axes.fill_between(x, y - half, y + half, color=color, alpha=0.2, linewidth=0)
    if method in METHODS:
      y, half = interval([100 * run['busy'] for run in runs.values()])
      share.bar(method.replace(', ', ',\n'), y, yerr=half, color=color, capsize=4)
  mean.set(xlabel='evaluations', ylabel='mean accuracy of 50 evaluations')
  best.set(xlabel='evaluations', ylabel='best accuracy so far', ylim=(0.97, 0.99))
  share.set(ylabel='time that workers evaluate (%)', ylim=(0, 100))
  figure.legend(*mean.get_legend_handles_labels(), loc='outside upper center', ncols=4)


if __name__ == '__main__':
  if sys.argv[1:2] == ['launch'] and len(sys.argv) == 3:
    from podrace.launch import run

    sys.exit(run(program(sys.argv[2]), sys.argv[2]))
  if sys.argv[1:]:
    sys.exit('usage: python nas.py, or python nas.py launch DIRECTORY')
  for method, runs in measure(range(3)).items():
    columns = ([x[key] for x in runs.values()] for key in ('last', 'best', 'cached', 'busy'))
    print(f'{method:20}', *('{:8.3f} +- {:.3f}'.format(*interval(x)) for x in columns))
