"""In the peer's virtual environment: stable-baselines3's PPO or DQN, in steps/s.

    python peer_sb3.py cartpole|pong NUM_ENVS N_STEPS EPOCHS MINIBATCHES SECONDS VECTOR
    python peer_sb3.py dqn NUM_ENVS N_STEPS GRADIENTS BATCH SECONDS VECTOR

VECTOR is dummy or subproc. Pong goes through SB3's own Atari wrappers (frame skip 4, 84 x 84, 4 frames,
clipped rewards) with its Nature CNN, as SB3's zoo does it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

LEARNS_FROM = 2_000  # steps from which on it is timed


def main() -> None:
  import stable_baselines3
  from stable_baselines3 import DQN, PPO
  from stable_baselines3.common.callbacks import BaseCallback
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
  elif task == 'dqn':  # GRADIENTS and BATCH stand where EPOCHS and MINIBATCHES do
    env = make_vec_env('CartPole-v1', num_envs, seed=0, vec_env_cls=vector)
    model = DQN(
      'MlpPolicy', env, train_freq=n_steps, gradient_steps=epochs, batch_size=minibatches,
      learning_starts=1000, learning_rate=2.5e-4, seed=0, device='cpu',
    )  # fmt: skip
  else:

    def pong(**settings: Any) -> Any:  # in the worker's process, where it is to be registered
      import ale_py  # noqa: F401 (registers the games)
      import gymnasium

      return gymnasium.make('PongNoFrameskip-v4', **settings)

    env = make_atari_env(pong, num_envs, seed=0, vec_env_cls=vector)
    model = PPO('CnnPolicy', VecFrameStack(env, 4), **common)

  class Clock(BaseCallback):
    """Starts after the first update, stops after `seconds`."""

    start, begun, steps = 0.0, 0, 0

    def _on_rollout_start(self) -> None:
      now = time.perf_counter()
      if self.num_timesteps > LEARNS_FROM and not self.start:
        self.start, self.begun = now, self.num_timesteps
      if self.start and now > self.start + seconds:
        self.rate = (self.num_timesteps - self.begun) / (now - self.start)

    def _on_step(self) -> bool:
      return not hasattr(self, 'rate')

  clock = Clock()
  model.learn(10**9, callback=clock)
  print(json.dumps(dict(steps_per_s=clock.rate, version=stable_baselines3.__version__)))


if __name__ == '__main__':
  main()
