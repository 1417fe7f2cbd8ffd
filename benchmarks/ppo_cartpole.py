"""PPO on CartPole against rejax: steady speed, compile time, and the return at the end.

Both sides have a separate actor and critic of 2 x 64 tanh with Flax's default initialisation, equal
batch sizes, epochs, minibatches and hyper-parameters, Adam with its usual epsilon and a constant
rate, and clipped values. They differ where the code has no setting for it:
- rejax limits each gradient element to `max_grad_norm`, podrace the global norm;
- rejax normalizes advantages over each minibatch, podrace over the batch;
- rejax shuffles the whole batch, podrace each environment's steps (see podrace/agents/ppo.py);
- rejax keeps an optimiser for each network, podrace one;
- rejax treats time limits as terminations, podrace bootstraps at them.

Each side runs in a new process for each repeat, in turn. Nothing is evaluated within training: the
actors are saved, and afterwards the same code here plays 128 greedy episodes of gymnax's CartPole-v1.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import common
import numpy as np

HYPER = dict(
  env='CartPole-v1', hidden=(64, 64), learning_rate=7.5e-4,  # from here on as in rejax's configs/gymnax/cartpole.yaml
  max_grad_norm=0.5, discount=0.99, clip=0.2, entropy_cost=0.01, value_cost=0.5,
) | {'lambda': 0.95}  # fmt: skip
STEADY = dict(HYPER, unroll_length=128, epochs=4, minibatches=4)
NUM_ENVS = (4, 64, 512)
STEPS_PER_CALL = 262_144
CALLS = 5  # the first is not in the rate
EPISODES = 128


class PpoWorker:
  """Answers the same requests as the peers, with podrace's PPO. `fresh`: each call is a new run."""

  def setup(self, config: dict[str, Any], steps: int) -> dict[str, Any]:
    import timing

    from podrace import envs

    self.updates, rest = divmod(steps, config['num_envs'] * config['unroll_length'])
    assert not rest, f'{steps} steps are not whole updates'
    env = envs.make(f'gymnax:{config["env"]}')
    self.trained = timing.start(agent(config), env, config['num_envs'], config['unroll_length'])
    return dict(compile_s=sum(self.trained.compile_s.values()))

  def run(self, seed: int, calls: int, save: str, fresh: bool = False) -> dict[str, Any]:
    import timing

    seconds, actors = [], []
    for call in range(calls):
      took = 0.0
      if fresh or not call:
        new_seed = 1000 * seed + call
        took, _ = timing.timed(lambda new_seed=new_seed: self.trained.reset(new_seed))
      seconds.append(took * fresh + self.trained.seconds(self.updates))
      actors.append(actor(self.trained.state.train.params.network))
    np.savez(save, *(np.stack(x) for x in zip(*actors, strict=True)))
    return dict(seconds=seconds)


def agent(config: dict[str, Any]) -> Any:
  """Returns podrace's PPO with a peer's settings; the defaults are rejax's."""
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  initializer = config.get('initializer', 'lecun')
  same = ('learning_rate', 'max_grad_norm', 'epochs', 'minibatches', 'discount', 'clip', 'value_cost', 'entropy_cost')  # fmt: skip
  return PPO(
    network=ActorCritic(hidden=tuple(config['hidden']), activation='tanh', initializer=initializer, shared=False),
    anneal_learning_rate=False, adam_epsilon=config.get('adam_epsilon', 1e-8), lambda_=config['lambda'],
    clip_value=config['clip'], **{name: config[name] for name in same},
  )  # fmt: skip


def actor(params: Any) -> list[np.ndarray]:
  """Returns kernel and bias of each layer of the policy, in order, as the peers save them."""
  torso = params['torso']['Mlp_0']
  layers = [*(torso[name] for name in sorted(torso)), params['policy_head']]
  return [np.asarray(layer[part]) for layer in layers for part in ('kernel', 'bias')]


def evaluate(actors: list[np.ndarray]) -> np.ndarray:
  """Returns the mean of EPISODES greedy returns of each of N actors; each array is [N, ...]."""
  import gymnax
  import jax
  import jax.numpy as jnp

  env, params = gymnax.make('CartPole-v1')

  @jax.jit
  def mean_return(actor: list[Any], key: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
      observation, state, total, over = carry
      x = jnp.tanh(observation @ actor[0] + actor[1])
      x = jnp.tanh(x @ actor[2] + actor[3])
      action = jnp.argmax(x @ actor[4] + actor[5], axis=-1)
      play = jax.vmap(env.step_env, in_axes=(None, 0, 0, None))
      observation, state, reward, terminated, _ = play(key, state, action, params)
      return (observation, state, total + jnp.where(over, 0.0, reward), over | terminated), None

    keys = jax.random.split(key, EPISODES)
    observation, state = jax.vmap(env.reset_env, in_axes=(0, None))(keys, params)
    begin = (observation, state, jnp.zeros(EPISODES), jnp.zeros(EPISODES, bool))
    (_, _, total, _), _ = jax.lax.scan(step, begin, None, params.max_steps_in_episode)
    return jnp.mean(total)

  key = jax.random.key(2**20)  # the same episodes for every actor
  return np.asarray(jax.lax.map(lambda a: mean_return(a, key), [jnp.asarray(x) for x in actors]))


def compare(
  sides: dict[str, list[str]], config: dict[str, Any], steps: int, repeats: int, fresh: bool = False
) -> dict[str, Any]:
  """Returns speed after the first call, compile time and return of both sides; podrace is the last side."""
  with tempfile.TemporaryDirectory() as folder:
    save = str(pathlib.Path(folder) / 'actors.npz')
    setup, run = dict(config=config, steps=steps), dict(calls=CALLS, save=save)

    def score(answer: dict[str, Any]) -> None:
      returns = evaluate(list(np.load(save).values()))
      answer['returns'] = returns if fresh else returns[-1:]

    run |= {'fresh': True} if fresh else {}
    answers = common.versus(sides, repeats, setup, run, score)
  rates = {k: [steps * (CALLS - 1) / sum(a['seconds'][1:]) for a in v] for k, v in answers.items()}
  compiles = {k: [a['compile_s'] for a in v] for k, v in answers.items()}
  scores = {k: [float(x) for a in v for x in a['returns']] for k, v in answers.items()}
  theirs, ours = sides
  ratio = {k: common.pair_ratio(x[ours], x[theirs]) for k, x in (('rate', rates), ('s', compiles))}
  result = dict(
    total_steps=steps * (1 if fresh else CALLS), steps_per_s=common.summaries(rates), speedup=ratio['rate'],
    compile_s=common.summaries(compiles), compile_ratio=ratio['s'], final_greedy_return=common.summaries(scores),
  )  # fmt: skip
  medians = {k: tuple(result[part][k]['median'] for part in ('steps_per_s', 'compile_s', 'final_greedy_return')) for k in sides}  # fmt: skip
  text = ', '.join(f'{k} {rate:,.0f} steps/s, compile {s:.1f} s, return {score:.0f}' for k, (rate, s, score) in medians.items())  # fmt: skip
  print(f'{config["num_envs"]} environments: {text}; {result["speedup"]:.2f}x', flush=True)
  return result


def main() -> None:
  args = common.arguments(__doc__, repeats=3, envs=([*NUM_ENVS], 'numbers of environments'))
  if args.worker is not None:
    worker = PpoWorker()
    common.serve(setup=worker.setup, run=worker.run)
    return
  sides = {
    'rejax': [common.peer('rejax'), 'benchmarks/peers/peer_rejax.py'],
    'podrace': [sys.executable, 'benchmarks/ppo_cartpole.py', '--worker'],
  }
  with common.Worker(sides['rejax']) as worker:
    versions = worker.ask(do='versions')
  results = {n: compare(sides, dict(STEADY, num_envs=n), STEPS_PER_CALL, args.repeats) for n in args.envs}  # fmt: skip
  common.record('ppo_cartpole', dict(steady=dict(config=STEADY, results=results)), versions)


if __name__ == '__main__':
  main()
