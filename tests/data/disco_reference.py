"""Records the numbers of DiscoRL's released code on fixed inputs: tests/data/disco_reference.json.

    git clone https://github.com/google-deepmind/disco_rl
    python -m venv VENV; VENV/bin/pip install jax dm-haiku rlax distrax ml_collections chex dm_env optax \
      immutabledict jmp absl-py
    VENV/bin/python tests/data/disco_reference.py disco_rl disco_rl/disco_rl/update_rules/weights/disco_103.npz COMMIT

It runs their `Agent.learner_step` as it is, with their settings. In the place of their network stands a table: the
parameters are the predictions of each timestep. So the numbers are of the rule, the targets, the losses, their
gradients and the optimiser, and of nothing else, with double precision. The inputs are in tests/support/disco_inputs.py. It needs nothing of
podrace, and no podrace process needs it: tests/agents/test_disco.py compares with its record.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / 'tests' / 'data' / 'disco_reference.json'
LOGGED = ('total_loss', 'pi_loss', 'aux_kl_loss', 'q_loss', 'q_target', 'td')


def main(checkout: str, weights: str, commit: str) -> None:
  sys.path[:0] = [checkout, str(ROOT / 'tests' / 'support')]
  import chex
  import disco_inputs as inputs
  import jax
  import numpy as np

  # rlax turns atoms into values by a difference of nearly equal numbers, so f32 has but four digits of them.
  jax.config.update('jax_enable_x64', True)
  # Under newer versions of JAX chex's own excludes traced arrays, and their code asks for it.
  chex.Array = jax.Array | np.ndarray
  from disco_rl import agent as agents
  from disco_rl import types
  from dm_env import specs

  settings = agents.get_settings_disco()
  settings.learning_rate = inputs.LEARNING_RATE
  agent = agents.Agent(
    single_observation_spec={'x': specs.Array((1,), np.float32)},
    single_action_spec=specs.BoundedArray((), np.int32, 0, inputs.A - 1),
    agent_settings=settings,
    batch_axis_name=None,
  )
  table = jax.tree.map(np.float64, inputs.predictions())
  agent._network = types.PolicyNetwork(
    init=lambda *_: (table, {}), one_step=None, unroll=lambda params, state, *_: (params, state)
  )
  flat = np.load(weights, allow_pickle=False)
  rule: dict[str, dict[str, np.ndarray]] = {}
  for name in flat.files:
    module, _, kind = name.rpartition('/')
    rule.setdefault(module, {})[kind] = np.float64(flat[name])
  state = agent.initial_learner_state(jax.random.PRNGKey(0))
  state = jax.tree.map(lambda x: np.float64(x) if x.dtype == np.float32 else x, state)
  updates = []
  for update in range(inputs.UPDATES):
    t = inputs.trajectory(update)
    t = {k: np.float64(x) if x.dtype == np.float32 else x for k, x in t.items()}
    rollout = types.ActorRollout(
      observations=np.zeros((inputs.T + 1, inputs.B, 1), np.float32),
      actions=t['action'],
      rewards=t['reward'],
      discounts=~t['last'],
      agent_outs={'logits': t['behaviour']},
      states={},
      logits=t['behaviour'],
    )
    state, _, log = jax.jit(agent.learner_step, static_argnums=5)(
      jax.random.PRNGKey(0), rollout, state, {}, rule, False
    )
    out, meta = log['meta_out'], state.meta_state
    (rnn,) = jax.tree.leaves(meta['rnn_state'], is_leaf=lambda x: hasattr(x, 'cell'))
    ema = meta['adv_ema_state']
    values = {name: log[name] for name in LOGGED} | {
      'q_targets': out['q_target'],
      'advantage': out['adv'],
      'scaled_advantage': out['normalized_adv'],
      'pi_hat': out['pi'],
      'y_hat': out['y'][..., ::60],
      'z_hat': out['z'][..., ::60],
      'hidden': rnn.hidden,
      'cell': rnn.cell,
      'moments': [ema.moment1, ema.moment2, ema.decay_product],
    }
    updates.append(
      {k: inputs.rounded(np.asarray(v)) for k, v in values.items()}
      | {
        'mean_gradient': inputs.shown(state.opt_state[0].mu),
        'params': inputs.shown(state.params),
        'target_params': inputs.shown(meta['target_params']),
      }
    )
  names = ('jax', 'jaxlib', 'dm-haiku', 'rlax', 'distrax', 'optax', 'numpy')
  document = dict(
    source='https://github.com/google-deepmind/disco_rl',
    commit=commit,
    weights_sha256=hashlib.sha256(pathlib.Path(weights).read_bytes()).hexdigest(),
    versions={name: importlib.metadata.version(name) for name in names},
    script='tests/data/disco_reference.py',
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    updates=updates,
  )
  OUT.parent.mkdir(exist_ok=True)
  OUT.write_text(json.dumps(document) + '\n')
  print(f'wrote {OUT.relative_to(ROOT)}, {OUT.stat().st_size:,} bytes')


if __name__ == '__main__':
  if len(sys.argv) != 4:
    sys.exit((__doc__ or '').strip())
  main(*sys.argv[1:])
