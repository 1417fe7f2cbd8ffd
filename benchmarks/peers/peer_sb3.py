"""In the peer's virtual environment: stable-baselines3's PPO, DQN or SAC, in steps/s.

    python peer_sb3.py cartpole|pong NUM_ENVS N_STEPS EPOCHS MINIBATCHES SECONDS VECTOR
    python peer_sb3.py dqn|sac SETTINGS

SETTINGS are those of value_agents.py as JSON, and the greedy return is told as well. VECTOR is dummy or subproc. Pong goes through SB3's own Atari wrappers (frame skip 4, 84 x 84, 4 frames,
clipped rewards) with its Nature CNN, as SB3's zoo does it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

LEARNS_FROM = 2_000  # steps from which on it is timed


def learn(model: Any, steps: int, seconds: float) -> float:
  """Steps/s from LEARNS_FROM until so many steps or seconds are over."""
  from stable_baselines3.common.callbacks import BaseCallback

  class Clock(BaseCallback):
    start, begun, rate, over = 0.0, 0, 0.0, False

    def _on_rollout_start(self) -> None:
      now = time.perf_counter()
      if self.start:
        self.rate = (self.num_timesteps - self.begun) / (now - self.start)
        self.over = now > self.start + seconds
      elif self.num_timesteps > LEARNS_FROM:
        self.start, self.begun = now, self.num_timesteps

    def _on_step(self) -> bool:
      return not self.over

  clock = Clock()
  model.learn(steps, callback=clock)
  return clock.rate


def off_policy(task: str, s: dict[str, Any]) -> dict[str, float]:
  """DQN or SAC: every environment steps once, then there are `gradients`."""
  import torch
  from stable_baselines3 import DQN, SAC
  from stable_baselines3.common.env_util import make_vec_env
  from stable_baselines3.common.evaluation import evaluate_policy

  env = make_vec_env(s['env'], s['num_envs'], seed=s['seed'])
  policy: dict[str, Any] = dict(net_arch=s['hidden'], activation_fn=torch.nn.ReLU)
  same: dict[str, Any] = dict(
    learning_rate=s['learning_rate'], buffer_size=s['capacity'], learning_starts=s['min_size'],
    batch_size=s['batch'], gamma=s['discount'], train_freq=1, gradient_steps=s['gradients'],
    seed=s['seed'], device='cpu',
  )  # fmt: skip
  if task == 'dqn':
    policy['optimizer_kwargs'] = dict(eps=s['adam_epsilon'])
    model: Any = DQN(
      'MlpPolicy', env, policy_kwargs=policy, max_grad_norm=s['max_grad_norm'],
      target_update_interval=s['target_steps'], exploration_initial_eps=1.0,
      exploration_final_eps=s['epsilon'], exploration_fraction=s['explore_steps'] / s['steps'], **same,
    )  # fmt: skip
  else:
    model = SAC(
      'MlpPolicy', env, policy_kwargs=policy, tau=s['target_rate'], ent_coef='auto', **same
    )
  rate = learn(model, s['steps'], math.inf)
  greedy, _ = evaluate_policy(
    model, make_vec_env(s['env'], 8, seed=1_000), s['episodes'], deterministic=True
  )
  return dict(steps_per_s=rate, greedy_return=float(greedy))


def main() -> None:
  import stable_baselines3

  if sys.argv[1] in ('dqn', 'sac'):
    told = off_policy(sys.argv[1], json.loads(sys.argv[2]))
  else:
    told = dict(steps_per_s=ppo())
  print(json.dumps(told | dict(version=stable_baselines3.__version__)))


def ppo() -> float:
  from stable_baselines3 import PPO
  from stable_baselines3.common.env_util import make_atari_env, make_vec_env
  from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

  task = sys.argv[1]
  num_envs, n_steps, epochs, minibatches = map(int, sys.argv[2:6])
  seconds, vector = (
    float(sys.argv[6]),
    {'dummy': DummyVecEnv, 'subproc': SubprocVecEnv}[sys.argv[7]],
  )
  common: dict[str, Any] = dict(
    n_steps=n_steps,
    batch_size=num_envs * n_steps // minibatches,
    n_epochs=epochs,
    learning_rate=1e-3 if task == 'cartpole' else 2.5e-4,
    seed=0,
    device='cpu',
  )
  if task == 'cartpole':
    env = make_vec_env('CartPole-v1', num_envs, seed=0, vec_env_cls=vector)
    model = PPO(
      'MlpPolicy', env, policy_kwargs=dict(net_arch=dict(pi=[64, 64], vf=[64, 64])), **common
    )
  else:

    def pong(**settings: Any) -> Any:  # in the worker's process, where it is to be registered
      import ale_py  # noqa: F401 (registers the games)
      import gymnasium

      return gymnasium.make('PongNoFrameskip-v4', **settings)

    env = make_atari_env(pong, num_envs, seed=0, vec_env_cls=vector)
    model = PPO('CnnPolicy', VecFrameStack(env, 4), **common)

  return learn(model, 10**9, seconds)


if __name__ == '__main__':
  main()
