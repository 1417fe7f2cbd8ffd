"""podrace eval: evaluate the newest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from podrace.commands.configure import agent_settings, parse
from podrace.commands.shared_options import (
  ALLOW_CODE,
  CHECKPOINT,
  NO_COMPILE_CACHE,
  allowed_modules,
)
from podrace.errors import UsageError
from podrace.run import compile_cache
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, results_alone, tell

COMMAND = Command(
  'eval',
  'DIR [OPTIONS]',
  'play episodes with a checkpoint of the run in DIR, twice: greedy, with the best '
  'action, and sampled, as in training',
  (
    Option('--episodes', 'N', 'number of episodes, for each seed and way of acting', 100),
    Option('--env', 'LIB:NAME', 'environment, if not that of training: another opponent or other '
      'levels'),
    Option('--seed', 'S', 'seed of the evaluation', 0),
    Option('--greedy', '', 'only greedy episodes'),
    Option('--sample', '', 'only sampled episodes; if each environment has its own exploration '
      "rate, the episodes spread over the run's rates"),
    Option('--max-steps', 'N', 'give up on longer episodes', 1_000_000),
    CHECKPOINT,
    Option('--member', 'I', 'only this seed of a run with several, from 0'),
    NO_COMPILE_CACHE,
    ALLOW_CODE,
  ),
  """
--agent.FIELD VALUE changes a setting of the agent: with --agent.simulations 0, muzero acts without
a search.

The last line printed is JSON: episode_return_mean, episode_return_std, episodes. If there are also
greedy episodes, the sampled ones are sampled_episode_return_mean, sampled_episode_return_std and
sampled_episodes.
""",
  jax=True,
  foreign={
    '--episodes': 'n-eval-episodes num-episodes n-episodes eval-episodes',
    '--greedy': 'deterministic no-explore',
    '--sample': 'stochastic explore',
    '--max-steps': 'timesteps max-episode-steps',
    '--checkpoint best or --checkpoint newest': 'best load-best latest',
    'podrace watch RUN': 'render render-mode video capture-video record',
    'podrace eval DIR, without an option': 'model model-path load load-path run-dir path',
    'JAX_PLATFORMS=cpu podrace ... for the CPU': 'device cpu cuda gpu no-cuda',
  },
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Evaluate."""
  settings, args = agent_settings(args)
  options = Options(args, COMMAND)
  run_dir = Path(options.one_argument('run directory'))
  if '--greedy' in options and '--sample' in options:
    raise UsageError('--greedy and --sample: leave out both options for both kinds')
  allowed = allowed_modules(options)
  from podrace.run import evaluate
  from podrace.run.directory import load_config

  if '--no-compile-cache' not in options:
    compile_cache.enable(tell)
  only = evaluate.GREEDY if '--greedy' in options else ''
  only = evaluate.SAMPLED if '--sample' in options else only
  acting = (only,) if only else evaluate.ACTING
  episodes, seed, max_steps = map(options.whole, ('--episodes', '--seed', '--max-steps'))
  config = None
  if settings:
    recorded = load_config(run_dir, allowed)
    config = parse(recorded, settings, 'podrace eval')
    evaluate.check_shapes(run_dir, recorded, config)
  result = evaluate.evaluate(
    run_dir, episodes, seed, acting, max_steps, allowed,
    config=config,
    env=options.text('--env'),
    say=tell,
    checkpoint=options.text('--checkpoint'),
    member=options.whole('--member') if '--member' in options else None,
  )  # fmt: skip
  tell(evaluate.format_result(result, acting))
  print_json(result)
  return 0
