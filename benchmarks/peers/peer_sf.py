"""In the peer's virtual environment: sample-factory's APPO, in steps/s.

    python peer_sf.py cartpole|pong NUM_ENVS ROLLOUT EPOCHS MINIBATCHES SECONDS WORKERS

Asynchronous, as it is meant to be run, with WORKERS processes for the environments on the CPU. Told is the
median of what it logs every few seconds (its rate over the last 10), without the first two. It is ended from
here: in asynchronous mode its own `train_for_seconds` did not end it. CartPole's rewards are scaled as it
recommends, or it would write a warning for each of its minibatches.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

WARM_UP = 2  # lines of its log


class Rates(logging.Handler):
  """Steps/s that sample-factory logs; told, and the end of everything, after so many seconds."""

  def __init__(self, seconds: float, directory: str) -> None:
    super().__init__()
    self._found: list[float] = []
    self._end, self._directory = time.monotonic() + seconds, directory

  def emit(self, record: logging.LogRecord) -> None:
    if found := re.search(r'Fps is \(10 sec: ([\d.]+)', record.getMessage()):
      self._found.append(float(found[1]))
      if time.monotonic() > self._end and len(self._found) > WARM_UP:
        told = self._found[WARM_UP:]
        print(json.dumps(dict(rate=statistics.median(told), rates=told)), flush=True)
        for process in multiprocessing.active_children():
          process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


def pong(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
  """84 x 84, 4 frames, frame skip 4, clipped rewards: its own wrappers."""
  import gymnasium
  from ale_py.registration import register_v0_v4_envs
  from sample_factory.envs.env_wrappers import (
    ClipRewardEnv,
    FireResetEnv,
    MaxAndSkipEnv,
    NoopResetEnv,
    NumpyObsWrapper,
  )

  if 'PongNoFrameskip-v4' not in gymnasium.registry:
    register_v0_v4_envs()  # ale-py does it itself from Gymnasium 1.0 on
  env: Any = gymnasium.make('PongNoFrameskip-v4', render_mode=render_mode)
  env = FireResetEnv(MaxAndSkipEnv(NoopResetEnv(env, noop_max=30), skip=4))
  env = gymnasium.wrappers.ResizeObservation(ClipRewardEnv(env), (84, 84))
  env = gymnasium.wrappers.GrayScaleObservation(env)
  return NumpyObsWrapper(gymnasium.wrappers.FrameStack(env, 4))


def cartpole(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
  import gymnasium

  return gymnasium.make('CartPole-v1', render_mode=render_mode)


def main() -> None:
  from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
  from sample_factory.envs.env_utils import register_env
  from sample_factory.train import run_rl
  from sample_factory.utils.utils import log

  task = sys.argv[1]
  num_envs, rollout, epochs, minibatches = map(int, sys.argv[2:6])
  seconds, workers = float(sys.argv[6]), int(sys.argv[7])
  directory = tempfile.mkdtemp()
  settings: dict[str, Any] = dict(
    algo='APPO', env=task, experiment='bench', train_dir=directory, device='cpu', seed=0,
    num_workers=workers, num_envs_per_worker=num_envs // workers, worker_num_splits=2,
    rollout=rollout, num_epochs=epochs, num_batches_per_epoch=minibatches,
    batch_size=num_envs * rollout // minibatches, use_rnn=False, recurrence=1, with_vtrace=False,
    normalize_input=False, normalize_returns=False, save_every_sec=10_000,
    learning_rate=1e-3 if task == 'cartpole' else 2.5e-4, serial_mode=False, async_rl=True,
  )  # fmt: skip
  if task == 'cartpole':
    settings |= dict(nonlinearity='tanh', actor_critic_share_weights=False, reward_scale=0.1)
    more = ['--encoder_mlp_layers', '64', '64']
  else:
    settings |= dict(
      nonlinearity='relu', encoder_conv_architecture='convnet_atari', obs_scale=255.0
    )
    more = ['--encoder_conv_mlp_layers', '512']
  register_env(task, cartpole if task == 'cartpole' else pong)
  log.addHandler(Rates(seconds, directory))
  argv = [f'--{k}={v}' for k, v in settings.items()] + more
  parser, _ = parse_sf_args(argv=argv)
  run_rl(parse_full_cfg(parser, argv))
  raise RuntimeError('it ended before it was to')


if __name__ == '__main__':
  main()
