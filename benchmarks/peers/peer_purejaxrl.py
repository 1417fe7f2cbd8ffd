"""The other side of purejaxrl.py: purejaxrl's PPO as it stands in its checkout; runs in an environment of its own.

Requests (JSON lines): `setup` compiles its `train`, which begins with fresh parameters; `run` times whole calls of
it, each from another seed, and saves the actors at their ends.

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
import timing

OPTIONS = {  # ours in its words
  'learning_rate': 'LR', 'num_envs': 'NUM_ENVS', 'unroll_length': 'NUM_STEPS', 'epochs': 'UPDATE_EPOCHS',
  'minibatches': 'NUM_MINIBATCHES', 'discount': 'GAMMA', 'lambda': 'GAE_LAMBDA', 'clip': 'CLIP_EPS',
  'entropy_cost': 'ENT_COEF', 'value_cost': 'VF_COEF', 'max_grad_norm': 'MAX_GRAD_NORM', 'env': 'ENV_NAME',
}  # fmt: skip
CONSTANT = dict(ACTIVATION='tanh', ANNEAL_LR=False, DEBUG=False)
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'distrax', 'gymnax')


def actor(out: Any) -> list[np.ndarray]:
  """Returns kernel and bias of each layer of the policy, in order; the critic's come after them."""
  layers = out['runner_state'][0].params['params']
  return [np.asarray(layers[f'Dense_{i}'][part]) for i in range(3) for part in ('kernel', 'bias')]


def main() -> None:
  sys.path.insert(0, str(pathlib.Path(sys.argv[1], 'purejaxrl')))
  with contextlib.redirect_stdout(sys.stderr):  # Brax, which it imports, prints
    import ppo  # type: ignore[import-not-found]

  program: Any = None

  def setup(config: dict[str, Any], steps: int) -> dict[str, Any]:
    nonlocal program
    settings = {theirs: config[ours] for ours, theirs in OPTIONS.items()}
    train = jax.jit(ppo.make_train(settings | CONSTANT | dict(TOTAL_TIMESTEPS=steps)))
    begin = time.perf_counter()
    program = train.lower(jax.random.key(0)).compile()
    return dict(compile_s=time.perf_counter() - begin)

  def run(seed: int, calls: int, save: str, fresh: bool) -> dict[str, Any]:
    keys = [jax.random.key(1000 * seed + call) for call in range(calls)]
    seconds, outs = zip(*(timing.timed(lambda k=key: program(k)) for key in keys), strict=True)
    np.savez(save, *(np.stack(x) for x in zip(*map(actor, outs), strict=True)))
    return dict(seconds=seconds)

  common.serve(PACKAGES, setup=setup, run=run)


if __name__ == '__main__':
  main()
