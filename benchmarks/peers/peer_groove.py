"""The other side of discover_peers.py: groove's meta-training of LPG, from its checkout, in an environment of its own.

Its `train.make_train` is one program: a population from its beginning, and some meta-steps. It is left as it is, but for
the evaluation of each agent after each meta-step, which podrace does not have: a constant stands in its place.

groove was written for JAX 0.4.13. Under a newer one the names that it imports from JAX are put back, and packages that
only its evolution strategies and its logging need are empty if they are missing.

    python benchmarks/peers/peer_groove.py CHECKOUT
"""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
import sys
import types
from typing import Any

import common
import jax
import jax.numpy as jnp
import timing
from flax import linen as nn

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'gymnax', 'evosax')
OPTIONS = {  # ours in its words
  'agents': 'num_agents', 'num_envs': 'env_workers', 'unroll_length': 'train_rollout_len',
  'agent_updates': 'num_agent_updates', 'trajectory': 'lpg_gru_width', 'predictions': 'lpg_target_width',
  'embedding': 'lpg_embedding_net_width', 'mini_batches': 'num_mini_batches', 'meta_steps': 'train_steps',
}  # fmt: skip


class SizedGRU(nn.Module):
  """The cell of a newer Flax, as wide as its state."""

  cell = nn.GRUCell

  @nn.compact
  def __call__(self, state: Any, x: Any) -> Any:
    return type(self).cell(state.shape[-1])(state, x)


def module(name: str, **contents: Any) -> None:
  """Makes a module of a name."""
  sys.modules[name] = types.ModuleType(name)
  vars(sys.modules[name]).update(contents)


def restore_names() -> None:
  """Restores the names that a newer JAX has no more, or has elsewhere."""
  if not hasattr(jax, 'tree_map'):
    jax.tree_map = jax.tree.map
    module('jax.config', config=jax.config)
  if importlib.util.find_spec('evosax') is None:
    none = dict.fromkeys(('Strategy', 'EvoParams', 'EvoState', 'OpenES'), object)
    module('evosax', **none)
  if importlib.util.find_spec('wandb') is None:
    module('wandb')
  if 'features' in inspect.signature(nn.GRUCell).parameters:
    nn.GRUCell = SizedGRU


def load(checkout: str) -> Any:
  """Returns parse_args and make_train of groove, which evaluates nothing."""
  ours = pathlib.Path(__file__).resolve().parent.parent
  others = [p for p in sys.path if ours not in (pathlib.Path(p), *pathlib.Path(p).parents)]
  sys.path[:] = [checkout, *others]  # modules of the benchmarks have names of its packages
  restore_names()
  import meta.train  # type: ignore[import-not-found]
  from experiments.parse_args import parse_args  # type: ignore[import-not-found]
  from train import make_train  # type: ignore[import-not-found]

  meta.train.eval_agent = lambda *_: jnp.float32(0)
  return parse_args, make_train


def main() -> None:
  parse_args, make_train = load(sys.argv[1])
  program: Any = None

  def setup(config: dict[str, Any]) -> dict[str, Any]:
    options = [f'--{theirs}={config[ours]}' for ours, theirs in OPTIONS.items()]
    args = parse_args([*options, f'--env_mode={config["worlds"]}'])

    def build() -> None:
      nonlocal program
      program = jax.jit(make_train(args)).lower(jax.random.PRNGKey(0)).compile()

    took = timing.clocked(build)
    size = program.memory_analysis().temp_size_in_bytes / 2**20  # 0: JAX 0.4.13 does not say it
    return took | dict(temp_mib=size or None)

  def run(seed: int) -> dict[str, Any]:
    key = jax.random.PRNGKey(seed)
    return timing.clocked(lambda: jax.block_until_ready(program(key)))

  common.serve(PACKAGES, setup=setup, run=run)


if __name__ == '__main__':
  main()
