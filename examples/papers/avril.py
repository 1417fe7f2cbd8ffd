"""AVRIL: approximate variational reward imitation learning (Chan and van der Schaar 2021).

arXiv 2102.06483. Rewards and a policy from demonstrations alone: no environment, no model of it, no
inner solver of MDPs. The policy is pi(a|s) = softmax(beta Q(s, a)), and the posterior of the reward
is Gaussian, q(R|s, a) = N(mean(s, a), deviation(s, a)^2). Over demonstrated (s, a, s', a') it
maximises

    log pi(a|s) - KL(q(R|s, a) || N(0, 1)) + lambda log q(Q(s, a) - gamma Q(s', a'))

so that a temporal difference of Q is a likely reward. Gradients go through both values of Q, which
is no semi-gradient. Without the last two terms it is behaviour cloning, podrace's `bc`.

As in the released code, gamma, lambda and beta are 1, and the last step of an episode, which has no
successor, is left out. Deviations: ReLU instead of ELU, a learning rate of 1e-3 instead of 1e-4.

    python examples/papers/avril.py        # a table; experts and data sets go to runs/avril

or, in this directory, with a data set that `podrace record` made:

    podrace train --agent avril:AVRIL --log DATASET --seeds 10
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import minari
import numpy as np
import optax
from jax import Array
from jax.scipy.stats import norm
from scipy import stats

import podrace
from podrace.agents.bc import BC
from podrace.learner import sgd
from podrace.networks import ActorCritic, QNetwork
from podrace.replay import Buffer, windows
from podrace.types import ActorOutput, Replay, Sample, TimeStep, TrainState, Trajectory

REPLAY = Buffer(capacity=20_000, min_size=10_000, batch_size=64, samples_per_insert=8.0)


@dataclasses.dataclass(frozen=True)
class AVRIL:
  """Learns from demonstrations only; use it with `--log`."""

  network: QNetwork = QNetwork()  # Q
  reward: QNetwork = QNetwork(head='quantile', num_atoms=2)  # mean and log deviation of q(R|s, a)
  buffer: Buffer = REPLAY
  learning_rate: float = 1e-3
  discount: float = 1.0  # gamma
  beta: float = 1.0  # inverse temperature of the demonstrator
  likelihood: float = 1.0  # lambda, the weight of the likelihood of temporal differences
  greedy: bool = False

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    return windows(self.buffer, 2, num_envs, unroll_length, stack=stack)  # s a s' a'

  def init(self, key: Array) -> TrainState:
    keys = jax.random.split(key)
    params = dict(q=self.network.init(keys[0]), reward=self.reward.init(keys[1]))
    return TrainState(params, optax.adam(self.learning_rate).init(params))

  def initial_state(self, env_id: Array) -> Any:
    return ()

  def values(self, params: Any, timesteps: TimeStep) -> Array:
    """Q(s, .) of timesteps [T, B]: [T, B, A]."""
    return self.network.unroll(params['q'], (), timesteps)[0][..., 0]

  def posterior(self, params: Any, timesteps: TimeStep) -> tuple[Array, Array]:
    """Mean and log deviation of q(R|s, .) for timesteps [T, B]: [T, B, A] each."""
    outputs, _ = self.reward.unroll(params['reward'], (), timesteps)
    return outputs[..., 0], outputs[..., 1]

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    logits = self.beta * self.values(params, jax.tree.map(lambda x: x[None], timestep))[0]
    policy = self.network.distribution
    return ActorOutput(policy.mode(logits) if self.greedy else policy.sample(logits, key)), state

  def loss(self, params: Any, trajectory: Trajectory) -> tuple[Array, Any]:
    """The objective's negative for windows of two steps, timesteps [3, B], and its terms."""
    pairs = jax.tree.map(lambda x: x[:2], trajectory.timesteps)  # s and s'
    action = trajectory.outputs.action  # [2, B]: a and a'
    mask = jnp.all(~pairs.last, axis=0)  # both timesteps have an action of one episode
    q = self.values(params, pairs)
    value = of_action(q, action)
    error = value[0] - self.discount * value[1]
    mean, log_std = (of_action(x, action)[0] for x in self.posterior(params, pairs))
    imitation = of_action(jax.nn.log_softmax(self.beta * q), action)[0]
    kl = 0.5 * (jnp.exp(2 * log_std) + mean**2 - 1) - log_std
    likelihood = norm.logpdf(error, mean, jnp.exp(log_std))
    terms = dict(imitation=imitation, kl=kl, likelihood=likelihood)
    terms = {name: jnp.mean(mask * x) for name, x in terms.items()}
    total = terms['kl'] - terms['imitation'] - self.likelihood * terms['likelihood']
    return total, terms | dict(loss=total)

  def learn(self, train: TrainState, sample: Sample, key: Array) -> tuple[TrainState, Array, Any]:
    loss, optimizer = lambda p: self.loss(p, sample.trajectory), optax.adam(self.learning_rate)
    params, opt_state, metrics = sgd(loss, optimizer, train.params, train.rest)
    return TrainState(params, opt_state), jnp.ones_like(sample.weight), metrics


def of_action(x: Array, action: Array) -> Array:
  """The entries [...] of x [..., A] that belong to actions [...]."""
  return jnp.take_along_axis(x, action[..., None], -1)[..., 0]


# --- experts, their demonstrations, and the measure -----------------------------------------------

FOLDER = Path('runs/avril')  # of experts and data sets
SIZES = (1, 3, 7, 10, 15)  # trajectories
STEPS = 10_000 + 24_000  # steps of the log: they fill replay, then make 3,000 gradient steps
NOISE = 0.5  # share of random actions in the episodes in which rewards are compared
METHODS = dict(AVRIL=AVRIL(), bc=BC(ActorCritic(activation='relu', initializer='lecun'), REPLAY))
EXPERTS = dict(  # environment, steps, steps between evaluations, episodes of each
  CartPole=('gymnax:CartPole-v1', 500_000, 25_000, 100),
  Acrobot=('gymnax:Acrobot-v1', 400_000, 25_000, 200),
  LunarLander=('envpool:LunarLander-v3', 1_000_000, 100_000, 64),
)
TRUTH = dict(CartPole='steps left', Acrobot='height of the tip', LunarLander='true reward')


def record(task: str, episodes: int, seed: int = 100, noise: float = 0.0) -> Path:
  """Train the expert and record greedy episodes, each once; return the data set."""
  expert, data = FOLDER / task, FOLDER / f'{task}-{episodes}-{seed}-v0'
  if not data.exists():
    settings = zip(
      ('env', 'total_steps', 'eval_every', 'eval_episodes'), EXPERTS[task], strict=True
    )
    config = podrace.configure(agent='dqn', seed=100, **dict(settings))
    podrace.train(config, expert, quiet=True)
    options = f'--checkpoint best --episodes {episodes} --seed {seed} --noise {noise} --greedy'
    command = [sys.executable, '-m', 'podrace', 'record', str(expert), '--to', str(data)]
    subprocess.run([*command, *options.split()], check=True, stdout=subprocess.DEVNULL)
  return data


class Keep:
  """A callback that keeps the parameters, which have an axis of seeds."""

  exact = False

  def __call__(self, line: Any) -> None: ...

  def transform(self, train: TrainState, line: Any) -> TrainState:
    self.params = jax.device_get(train.params)
    return train


def fit(agent: Any, log: Path, seeds: Sequence[int], env: str) -> tuple[list[float], Any]:
  """Learn from a log, all seeds in one program; return greedy returns and parameters."""
  sizes = dict(num_envs=16, unroll_length=16, total_steps=STEPS, log_every=STEPS, devices=1)
  config = podrace.configure(agent=agent, log=str(log), seed=seeds[0], seeds=len(seeds), **sizes)
  keep = Keep()
  with tempfile.TemporaryDirectory() as folder:
    result = podrace.train(config, Path(folder, 'run'), [keep], quiet=True)
    returns = result.evaluate(100, seed=seeds[0], env=env, acting='greedy')
  return returns['episode_return_mean_by_seed'], keep.params


def truth(task: str, episode: Any) -> np.ndarray:
  """The quantity [T] to compare with. Rewards are constant but for the last in the first two."""
  if task == 'Acrobot':
    cos1, sin1, cos2, sin2 = episode.observations[:-1, :4].T
    return -cos1 - (cos1 * cos2 - sin1 * sin2)
  return np.arange(len(episode.actions), 0, -1.0) if task == 'CartPole' else episode.rewards


def compare(agent: AVRIL, params: Any, task: str, log: Path) -> dict[str, Any]:
  """Rank correlations of E[R] with the truth by seed, and the posterior by deciles of the truth."""
  data = minari.MinariDataset(log / 'data')
  episodes = list(data.iterate_episodes())
  true = np.concatenate([truth(task, x) for x in episodes])
  action = jnp.concatenate([x.actions for x in episodes])[None]
  seen = jnp.concatenate([x.observations[:-1] for x in episodes])[None]
  timesteps = TimeStep(seen, *[jnp.zeros(action.shape)] * 2, jnp.zeros(action.shape, jnp.int8))
  reward = agent.reward.bind(data.observation_space, data.action_space)
  agent = dataclasses.replace(agent, reward=reward)
  by_seed = jax.vmap(lambda p: [of_action(x, action)[0] for x in agent.posterior(p, timesteps)])
  mean, log_std = map(np.asarray, by_seed(params))
  deciles = np.array_split(np.argsort(true, kind='stable'), 10)
  return dict(
    correlation=[float(stats.spearmanr(x, true).statistic) for x in mean],
    truth=[float(true[x].mean()) for x in deciles],
    mean=[[float(m[x].mean()) for x in deciles] for m in mean],
    deviation=[[float(np.exp(s[x]).mean()) for x in deciles] for s in log_std],
  )


def measure(seeds: Sequence[int]) -> dict[str, Any]:
  returns, posterior = {}, {}
  for task, (env, *_) in EXPERTS.items():
    returns[task] = {name: {} for name in METHODS}
    for size in SIZES:
      for name, agent in METHODS.items():
        means, params = fit(agent, record(task, size), seeds, env)
        returns[task][name][size] = means
        print(f'{task}, {name}, {size} trajectories: {format_mean(means)}', flush=True)
        if name == 'AVRIL' and size == SIZES[-1]:
          posterior[task] = compare(agent, params, task, record(task, 20, 1_000, NOISE))
          print(f'{task}: rank correlation {format_mean(posterior[task]["correlation"], 2)}')
    demonstrated = minari.MinariDataset(record(task, SIZES[-1]) / 'data').iterate_episodes()
    returns[task]['expert'] = [float(x.rewards.sum()) for x in demonstrated]
  return dict(returns=returns, posterior=posterior)


def half_width(values: Any) -> Any:
  """Half of the 95% interval of the mean over the last axis, by Student's distribution."""
  return stats.t.ppf(0.975, np.shape(values)[-1] - 1) * stats.sem(values, axis=-1)


def format_mean(values: Sequence[float], digits: int = 1) -> str:
  return f'{np.mean(values):.{digits}f} ± {half_width(values):.{digits}f}'


def draw(results: dict[str, Any], figure: Any) -> None:
  figure.set_size_inches(10, 6)
  axes = figure.subplots(2, len(EXPERTS))
  for (task, methods), above, below in zip(results['returns'].items(), *axes, strict=True):
    above.axhline(np.mean(methods['expert']), color='0.6', linestyle=':', label='expert')
    for name, shift in dict(AVRIL=-0.15, bc=0.15).items():
      x, y = [int(n) + shift for n in methods[name]], list(methods[name].values())
      above.errorbar(x, np.mean(y, -1), half_width(y), capsize=3, marker='o', label=name)
    above.set(title=task, xlabel='trajectories', ylabel='greedy return', xticks=SIZES)
    about = results['posterior'][task]
    mean, deviation, true = (
      np.mean(about['mean'], 0),
      np.mean(about['deviation'], 0),
      about['truth'],
    )
    below.fill_between(true, mean - deviation, mean + deviation, alpha=0.2, label='deviation')
    below.errorbar(true, mean, half_width(np.transpose(about['mean'])), capsize=3, label='mean')
    below.set(title=f'rank correlation {format_mean(about["correlation"], 2)}')
    below.set(xlabel=TRUTH[task], ylabel='posterior of the reward')
  axes[0, 0].legend()
  axes[1, 0].legend(loc='lower right')


if __name__ == '__main__':
  measure(range(100, 110))
