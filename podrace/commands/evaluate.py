"""podrace eval: evaluates the newest checkpoint of a run."""

from __future__ import annotations

import sys
from pathlib import Path

from podrace.commands.configure import agent_settings, parse
from podrace.commands.shared_options import ALLOW_CODE, NO_COMPILE_CACHE
from podrace.errors import UsageError
from podrace.run import compile_cache
from podrace.settings import user_code
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, print_text, results_alone, tell

COMMAND = Command(
  'eval',
  'DIR [OPTIONS]',
  'episodes of the newest checkpoint of the run in DIR, twice: greedily, by the best action, and '
  'sampled, as in training',
  (
    Option('--episodes', 'N', 'how many, of each seed and way of acting', 100),
    Option('--env', 'LIB:NAME', 'play there and not where the agent has learned: another opponent, other levels'),
    Option('--seed', 'S', 'of the evaluation', 0),
    Option('--greedy', '', 'greedily alone'),
    Option('--sample', '', 'sampled alone; where environments explore each by a rate of its own, with '
      "the rates of the run's environments, spread over the episodes"),
    Option('--max-steps', 'N', 'give up on episodes that are longer', 1_000_000),
    NO_COMPILE_CACHE,
    ALLOW_CODE,
  ),
  """
--agent.FIELD VALUE acts with another value of a setting than training did: with --agent.simulations 0, muzero acts
without a search.

The last line printed is JSON: episode_return_mean, episode_return_std, episodes; and of the sampled
ones, unless they are alone, sampled_episode_return_mean, sampled_episode_return_std, sampled_episodes.
""",
  jax=True,
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Evaluates."""
  settings, args = agent_settings(args)
  options = Options(args, COMMAND)
  run_dir = Path(options.one_argument('run directory'))
  if '--greedy' in options and '--sample' in options:
    raise UsageError('--greedy and --sample: leave out both, to have both')
  allowed = options.every('--allow-code')
  user_code.look_here(allowed)
  from podrace.run import evaluate

  if '--no-compile-cache' not in options:
    compile_cache.enable(lambda text: print_text(f'podrace eval: {text}', file=sys.stderr))
  only = evaluate.GREEDY if '--greedy' in options else ''
  only = evaluate.SAMPLED if '--sample' in options else only
  acting = (only,) if only else evaluate.ACTING
  episodes, seed, most = map(options.whole, ('--episodes', '--seed', '--max-steps'))
  result = evaluate.evaluate(
    run_dir, episodes, seed, acting, most, allowed,
    change=lambda config: parse(config, settings, 'podrace eval') if settings else config,
    env=options.text('--env'),
    say=tell,
  )  # fmt: skip
  tell(evaluate.format_result(result, acting))
  print_json(result)
  return 0
