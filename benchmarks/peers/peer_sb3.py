"""In the peer's virtual environment: stable-baselines3's PPO, DQN or SAC, in steps/s.

    python peer_sb3.py cartpole|pong NUM_ENVS N_STEPS EPOCHS MINIBATCHES SECONDS VECTOR
    python peer_sb3.py dqn|sac SETTINGS

SETTINGS are those of value_agents.py as JSON; then the greedy return is printed as well. VECTOR is dummy or subproc. Pong
goes through SB3's own Atari wrappers (frame skip 4, 84 x 84, 4 frames, clipped rewards) with its Nature CNN, as SB3's zoo
does it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import stable_baselines3
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

LEARNS_FROM = 2_000  # steps from which on it is timed


class Clock(BaseCallback):
  """The steps/s from LEARNS_FROM until the time is over."""

  def __init__(self, seconds: float) -> None:
    super().__init__()
    self.seconds, self.start, self.begun, self.rate, self.over = seconds, 0.0, 0, 0.0, False

  def _on_rollout_start(self) -> None:
    now = time.perf_counter()
    if self.start:
      self.rate = (self.num_timesteps - self.begun) / (now - self.start)
      self.over = now > self.start + self.seconds
    elif self.num_timesteps > LEARNS_FROM:
      self.start, self.begun = now, self.num_timesteps

  def _on_step(self) -> bool:
    return not self.over


def learn(model: Any, steps: int, seconds: float) -> float:
  clock = Clock(seconds)
  model.learn(steps, callback=clock)
  return clock.rate


def off_policy(task: str, s: dict[str, Any]) -> dict[str, float]:
  """Trains DQN or SAC: every environment steps once, then there are `gradients`."""
  env = make_vec_env(s['env'], s['num_envs'], seed=s['seed'])
  policy: dict[str, Any] = dict(net_arch=s['hidden'], activation_fn=torch.nn.ReLU)
  same: dict[str, Any] = dict(
    learning_rate=s['learning_rate'], buffer_size=s['capacity'], learning_starts=s['min_size'],
    batch_size=s['batch'], gamma=s['discount'], train_freq=1, gradient_steps=s['gradients'],
    seed=s['seed'], device='cpu', policy_kwargs=policy,
  )  # fmt: skip
  if task == 'dqn':
    policy['optimizer_kwargs'] = dict(eps=s['adam_epsilon'])
    model: Any = DQN(
      'MlpPolicy', env, max_grad_norm=s['max_grad_norm'], target_update_interval=s['target_steps'],
      exploration_initial_eps=1.0, exploration_final_eps=s['epsilon'],
      exploration_fraction=s['explore_steps'] / s['steps'], **same,
    )  # fmt: skip
  else:
    model = SAC('MlpPolicy', env, tau=s['target_rate'], ent_coef='auto', **same)
  rate = learn(model, s['steps'], math.inf)
  test = make_vec_env(s['env'], 8, seed=1_000)
  greedy, _ = evaluate_policy(model, test, s['episodes'], deterministic=True)
  return dict(steps_per_s=rate, greedy_return=float(greedy))


def make_pong(**settings: Any) -> Any:
  import ale_py  # noqa: F401 (registers the games, in the worker's process)
  import gymnasium

  return gymnasium.make('PongNoFrameskip-v4', **settings)


def ppo(task: str, sizes: list[str], seconds: float, vector: str) -> dict[str, float]:
  num_envs, n_steps, epochs, minibatches = map(int, sizes)
  kind = {'dummy': DummyVecEnv, 'subproc': SubprocVecEnv}[vector]
  same: dict[str, Any] = dict(
    n_steps=n_steps, batch_size=num_envs * n_steps // minibatches, n_epochs=epochs, seed=0, device='cpu'
  )  # fmt: skip
  if task == 'cartpole':
    env = make_vec_env('CartPole-v1', num_envs, seed=0, vec_env_cls=kind)
    policy = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]))
    model = PPO('MlpPolicy', env, learning_rate=1e-3, policy_kwargs=policy, **same)
  else:
    env = make_atari_env(make_pong, num_envs, seed=0, vec_env_cls=kind)
    model = PPO('CnnPolicy', VecFrameStack(env, 4), learning_rate=2.5e-4, **same)
  return dict(steps_per_s=learn(model, 10**9, seconds))


def main() -> None:
  task, *args = sys.argv[1:]
  if task in ('dqn', 'sac'):
    result = off_policy(task, json.loads(args[0]))
  else:
    result = ppo(task, args[:4], float(args[4]), args[5])
  print(json.dumps(result | dict(version=stable_baselines3.__version__)))


if __name__ == '__main__':
  main()
