"""In the peer's virtual environment: sample-factory's APPO, in steps/s.

    python peer_sf.py cartpole|pong NUM_ENVS ROLLOUT EPOCHS MINIBATCHES SECONDS WORKERS

Asynchronous, as it is meant to be run, with WORKERS processes for the environments on the CPU. Prints the median of the
rates that it logs every few seconds (over the last 10), without the first two. It is ended from here: in asynchronous mode
its own `train_for_seconds` did not end it. CartPole's rewards are scaled as it recommends, or it would write a warning for
each of its minibatches.
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
  """Collects the steps/s that sample-factory logs; prints them and ends all processes after some seconds."""

  def __init__(self, seconds: float, directory: str) -> None:
    super().__init__()
    self._rates: list[float] = []
    self._end, self._directory = time.monotonic() + seconds, directory

  def emit(self, record: logging.LogRecord) -> None:
    if match := re.search(r'Fps is \(10 sec: ([\d.]+)', record.getMessage()):
      self._rates.append(float(match[1]))
      if time.monotonic() > self._end and len(self._rates) > WARM_UP:
        rates = self._rates[WARM_UP:]
        print(json.dumps(dict(rate=statistics.median(rates), rates=rates)), flush=True)
        for process in multiprocessing.active_children():
          process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


def pong(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
  """84 x 84, 4 frames, frame skip 4, clipped rewards: its own wrappers."""
  import gymnasium
  from ale_py.registration import register_v0_v4_envs
  from sample_factory.envs import env_wrappers as w

  if 'PongNoFrameskip-v4' not in gymnasium.registry:
    register_v0_v4_envs()  # ale-py does it itself from Gymnasium 1.0 on
  env: Any = gymnasium.make('PongNoFrameskip-v4', render_mode=render_mode)
  env = w.FireResetEnv(w.MaxAndSkipEnv(w.NoopResetEnv(env, noop_max=30), skip=4))
  env = gymnasium.wrappers.ResizeObservation(w.ClipRewardEnv(env), (84, 84))
  env = gymnasium.wrappers.GrayScaleObservation(env)
  return w.NumpyObsWrapper(gymnasium.wrappers.FrameStack(env, 4))


def cartpole(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
  import gymnasium

  return gymnasium.make('CartPole-v1', render_mode=render_mode)


def main() -> None:
  from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
  from sample_factory.envs.env_utils import register_env
  from sample_factory.train import run_rl
  from sample_factory.utils.utils import log

  task, *sizes, seconds, workers = sys.argv[1:]
  num_envs, rollout, epochs, minibatches = map(int, sizes)
  directory = tempfile.mkdtemp()
  settings: dict[str, Any] = dict(
    algo='APPO', env=task, experiment='bench', train_dir=directory, device='cpu', seed=0,
    num_workers=workers, num_envs_per_worker=num_envs // int(workers), worker_num_splits=2,
    rollout=rollout, num_epochs=epochs, num_batches_per_epoch=minibatches,
    batch_size=num_envs * rollout // minibatches, use_rnn=False, recurrence=1, with_vtrace=False,
    normalize_input=False, normalize_returns=False, save_every_sec=10_000, serial_mode=False, async_rl=True,
  )  # fmt: skip
  if task == 'cartpole':
    settings |= dict(learning_rate=1e-3, nonlinearity='tanh', actor_critic_share_weights=False, reward_scale=0.1)  # fmt: skip
    more = ['--encoder_mlp_layers', '64', '64']
  else:
    settings |= dict(learning_rate=2.5e-4, nonlinearity='relu', encoder_conv_architecture='convnet_atari', obs_scale=255.0)  # fmt: skip
    more = ['--encoder_conv_mlp_layers', '512']
  register_env(task, cartpole if task == 'cartpole' else pong)
  log.addHandler(Rates(float(seconds), directory))
  argv = [f'--{k}={v}' for k, v in settings.items()] + more
  parser, _ = parse_sf_args(argv=argv)
  run_rl(parse_full_cfg(parser, argv))
  raise RuntimeError('it ended before its time')


if __name__ == '__main__':
  main()
