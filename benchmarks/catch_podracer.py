"""The Podracer notebook's setting: Catch, 128 environments, rollouts of 16, 2 x 256 ReLU, Adam 3e-4.

Steps/s of IMPALA (the notebook's kind of agent: one gradient per rollout) and of PPO with one epoch of
one minibatch. Against them a program that has nothing but the same network's matrix products: the same
products of the same shapes, in loops of the same lengths.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import common
import timing

HIDDEN = (256, 256)
NUM_ENVS, UNROLL = 128, 16
TINY = 1e-12  # ties a product to the one before it; costs one pass over its input


def agents() -> dict[str, Any]:
  """Returns the two variants, not bound yet."""
  from podrace.agents.impala import Impala
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  network = ActorCritic('mlp', hidden=HIDDEN, activation='relu', initializer='lecun', shared=True)
  ppo = PPO(network, learning_rate=3e-4, anneal_learning_rate=False, epochs=1, minibatches=1)
  return dict(impala=Impala(network, learning_rate=3e-4), ppo=ppo)


@dataclasses.dataclass(frozen=True)
class Products:
  """The matrix products of one update, without biases, activations or anything else.

  Acting: `unroll` times forward on [B]. Learning: forward on [(T+1)*B] once and, for PPO, once more on
  [T*B]. Backward, for each layer the gradient of its weights, and for all but the first that of its inputs.
  """

  sizes: tuple[int, ...]  # inputs, hidden layers, outputs (logits and value together)
  num_envs: int
  unroll: int
  separate_values: bool  # PPO: values first, the gradient without the last timestep

  @property
  def learned(self) -> int:
    return self.num_envs * (self.unroll + (not self.separate_values))

  def program(self) -> Any:
    """Compiles a function of a number of updates; each product depends on the one before."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def forward(weights: list[Any], x: Any) -> list[Any]:
      layers = [x]
      for w in weights:
        layers.append(layers[-1] @ w)
      return layers

    def update(_: Any, carry: Any) -> Any:
      weights, x = carry
      act = lambda x, _: (x + TINY * forward(weights, x)[-1][:, :1], None)  # noqa: E731
      first, _ = lax.scan(act, x[: self.num_envs], None, length=self.unroll)
      x = lax.dynamic_update_slice(x, first, (0, 0))
      if self.separate_values:
        x = x + TINY * forward(weights, x)[-1][:, :1]
      layers = forward(weights, x[: self.learned])
      g = layers.pop()
      grads = []
      for i in reversed(range(len(weights))):
        grads.append(layers[i].T @ g)
        if i:
          g = g @ weights[i].T
      return [w + TINY * g for w, g in zip(weights, reversed(grads), strict=True)], x

    keys = jax.random.split(jax.random.key(0), len(self.sizes))
    shapes = zip(keys[1:], self.sizes, self.sizes[1:], strict=False)
    weights = [jax.random.normal(k, (i, o)) / math.sqrt(i) for k, i, o in shapes]
    x = jax.random.normal(keys[0], ((self.unroll + 1) * self.num_envs, self.sizes[0]))
    run = jax.jit(lambda weights, x, updates: lax.fori_loop(0, updates, update, (weights, x)))
    compiled = run.lower(weights, x, jnp.int32(1)).compile()
    return lambda updates: compiled(weights, x, jnp.int32(updates))


def measure(
  name: str, num_envs: int = NUM_ENVS, repeats: int = 5, seconds: float = 2.0
) -> dict[str, Any]:
  """Returns steps/s of one variant, and the share of bare products in it, taken in turn."""
  from podrace import envs

  env = envs.make('podrace:catch')
  run = timing.start(agents()[name], env, num_envs, UNROLL)
  sizes = (math.prod(env.observation_space.shape), *HIDDEN, int(env.action_space.n) + 1)
  products = Products(sizes, num_envs, UNROLL, separate_values=name == 'ppo')
  bare = products.program()
  updates = timing.updates_for(run.seconds, seconds)
  bare(updates)
  took = [(run.seconds(updates), timing.timed(lambda: bare(updates))[0]) for _ in range(repeats)]
  ours, theirs = (statistics.median(x) / updates for x in zip(*took, strict=True))
  steps = updates * run.steps_per_update
  return dict(
    num_envs=num_envs, steps_per_s=common.summary([steps / s for s, _ in took]), update_ms=ours * 1e3,
    products_ms=theirs * 1e3, products_share=theirs / ours,  compile_s=run.compile_s, updates_per_call=updates,
  )  # fmt: skip


def main() -> None:
  args = common.arguments(__doc__, repeats=5, seconds=2.0)
  results = {}
  for name in agents():
    r = results[name] = measure(name, NUM_ENVS, args.repeats, args.seconds)
    rate, share = r['steps_per_s']['median'], r['products_share']
    print(f'{name}: {rate:,.0f} steps/s, bare products {share:.0%} of an update', flush=True)
  common.record('catch_podracer', results)


if __name__ == '__main__':
  main()
