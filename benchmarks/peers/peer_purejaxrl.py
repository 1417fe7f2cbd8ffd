"""The other side of purejaxrl.py: purejaxrl's PPO as it stands in its checkout; runs in an environment of its own.

Requests (JSON lines): `setup` compiles its `train`, which begins with fresh parameters; `run` times whole calls of
it, each from another seed, and saves the actors that they end with.

    python benchmarks/peers/peer_purejaxrl.py CHECKOUT
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from typing import Any

import common
import jax
import numpy as np


def settings(config: dict[str, Any], steps: int) -> dict[str, Any]:
  """Ours in its words; the rate is constant, and nothing is printed."""
  return dict(
    LR=config['learning_rate'],
    NUM_ENVS=config['num_envs'],
    NUM_STEPS=config['unroll_length'],
    TOTAL_TIMESTEPS=steps,
    UPDATE_EPOCHS=config['epochs'],
    NUM_MINIBATCHES=config['minibatches'],
    GAMMA=config['discount'],
    GAE_LAMBDA=config['lambda'],
    CLIP_EPS=config['clip'],
    ENT_COEF=config['entropy_cost'],
    VF_COEF=config['value_cost'],
    MAX_GRAD_NORM=config['max_grad_norm'],
    ACTIVATION='tanh',
    ENV_NAME=config['env'],
    ANNEAL_LR=False,
    DEBUG=False,
  )


def actor(out: Any) -> list[np.ndarray]:
  """Kernel and bias of each layer of the policy, in order; the critic's come after them."""
  layers = out['runner_state'][0].params['params']
  return [np.asarray(layers[f'Dense_{i}'][part]) for i in range(3) for part in ('kernel', 'bias')]


def main() -> None:
  """Answers the requests."""
  sys.path.insert(0, str(pathlib.Path(sys.argv[1], 'purejaxrl')))
  with contextlib.redirect_stdout(sys.stderr):  # Brax, which it imports, prints
    import ppo  # type: ignore[import-not-found]

  run = None
  for request in common.requests():
    match request['do']:
      case 'versions':
        common.answer(**common.versions(('jax', 'jaxlib', 'flax', 'optax', 'distrax', 'gymnax')))
      case 'setup':
        train = jax.jit(ppo.make_train(settings(request['config'], request['steps'])))
        start = time.perf_counter()
        run = train.lower(jax.random.key(0)).compile()
        common.answer(compile_s=time.perf_counter() - start)
      case 'run':
        assert run is not None
        seconds, actors = [], []
        for call in range(request['calls']):
          key = jax.random.key(1000 * request['seed'] + call)
          start = time.perf_counter()
          out = jax.block_until_ready(run(key))
          seconds.append(time.perf_counter() - start)
          actors.append(actor(out))
        np.savez(request['save'], *(np.stack(x) for x in zip(*actors, strict=True)))
        common.answer(seconds=seconds)


if __name__ == '__main__':
  main()
