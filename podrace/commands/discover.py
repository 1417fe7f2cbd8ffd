"""podrace discover: train a rule by which agents learn, or resume the training."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from podrace.commands import configure, help, train
from podrace.commands import shared_options as shared
from podrace.errors import UsageError
from podrace.run.directory import check_directory
from podrace.run.new_directory import run_directory
from podrace.settings.agents import agent_name, default_agent
from podrace.settings.discovery_presets import PRESETS
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_text, results_alone


class Discover(Command):
  """The command with help for the options of the rules."""

  def help(self, args: list[str]) -> str:
    """Return the help for a preset and an agent among `args`."""
    preset = configure.take_preset(args, PRESETS, 'preset of discover')
    agent = configure.requested_agent(Options(args, self, lenient=True))
    return help.discover_help(self.options, preset, agent)


COMMAND = Discover(
  'discover',
  '[PRESET] [OPTIONS]',
  'train a rule of learning',
  (  # the fields of Discovery are further options
    Option('--run-dir', 'DIR', 'the run directory, which also gets rule.npz; started again with '
      'the same one, the run resumes'),
    Option('--agent', 'NAME', 'agent: disco or lpg, which also selects the kind of rule '
      '(default: that of '
      'the preset)'),
    shared.NO_COMPILE_CACHE,
    shared.ALLOW_CODE,
    shared.OVERRIDE,
    shared.SINKS,
    shared.QUIET_RUN,
  ),
  others_pass=True,
  jax=True,
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Train a rule."""
  preset = configure.take_preset(args, PRESETS, 'preset of discover')
  options = Options(args, COMMAND)
  run_dir, allowed = options.path('--run-dir'), configure.allowed_modules(options)
  if run_dir is not None:
    check_directory(run_dir)
  base = base_config(preset, run_dir, configure.requested_agent(options), allowed)
  config = configure.parse(base, options.arguments, 'podrace discover')

  from podrace.run import loop as runs

  sinks = tuple(s for s in options.text('--sinks').split(',') if s)
  quiet, name = '--quiet' in options, f'discover-{preset or agent_name(config.agent)}'
  with contextlib.ExitStack() as stack:
    run_dir = stack.enter_context(run_directory(run_dir, name))
    stack.enter_context(log_to_stderr('podrace discover', quiet))
    shared.enable_compile_cache(options)
    override = '--override' in options
    summary = runs.discover(config, run_dir, override=override, sinks=sinks, quiet=quiet)
  _report(run_dir, summary, config)
  return 0


def base_config(
  preset: str | None, run_dir: Path | None, agent: str | None, allowed: list[str]
) -> Any:
  """Return the configuration before the flags: the preset's, else the run's, else the default."""
  from podrace.run.directory import load_any
  from podrace.settings.discovery import Discovery, rules_of

  if preset is None and run_dir is not None and (run_dir / 'config.json').exists():
    config = load_any(run_dir, allowed)
    if not isinstance(config, Discovery):
      raise UsageError(f'{run_dir} holds a run of `podrace train`: give another --run-dir')
  else:
    config = PRESETS[preset or help.DISCOVER_DEFAULT]()
  if agent is not None and agent != agent_name(config.agent):
    other = default_agent(agent)
    config = dataclasses.replace(config, agent=other, rule=rules_of(other).Sizes())
  return config


def _report(run_dir: Path, summary: dict[str, Any], config: Any) -> None:
  out = train.print_summary(run_dir, summary, ' of its agents')
  print_text(f'next: {next_command(config, run_dir / "rule.npz")}', file=out)


def next_command(config: Any, rule: Path) -> str:
  """Return the command that trains an agent by the rule, with options for the rule's widths."""
  name = agent_name(config.agent)
  sizes = default_agent(name).fits(config.rule)
  needed = [f'{option} {size}' for option, (default, size) in sizes.items() if default != size]
  return ' '.join([f'podrace train --agent {name} --agent.rule {shlex.quote(str(rule))}', *needed])
