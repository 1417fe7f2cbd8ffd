"""podrace export: write the policy of a run for use in other programs."""

from __future__ import annotations

from pathlib import Path

from podrace.commands.shared_options import ALLOW_CODE, CHECKPOINT, allowed_modules
from podrace.errors import UsageError
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, results_alone, tell

COMMAND = Command(
  'export',
  'RUN DIR [OPTIONS]',
  "write the policy of a run to a new directory, for use without training code",
  (
    Option('--member', 'I', 'index of the seed, from 0, in a run with --seeds', 0),
    CHECKPOINT,
    ALLOW_CODE,
  ),
  """
DIR gets params.safetensors, policy.json (spaces, network, hashes), config.json, policy.jaxexport
for JAX, and policy.onnx if the extra onnx is installed and the network is one of podrace's. Usage:

    import podrace
    policy = podrace.load_policy('DIR')
    action, state = policy.act(observation)           # then policy.act(observation, state)

The last line printed is policy.json.
""",
  jax=True,
  foreign={
    'podrace export RUN DIR, which writes all forms to DIR': 'format onnx to type output out '
    'output-dir run-dir safetensors',
  },
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Export."""
  options = Options(args, COMMAND)
  if len(options.arguments) != 2:
    raise UsageError('export takes a run and a new directory: podrace export RUN DIR')
  run_dir, folder = map(Path, options.arguments)
  allowed = allowed_modules(options)
  from podrace.policy import onnx
  from podrace.policy.export import export
  from podrace.policy.load import GRAPH

  checkpoint = options.text('--checkpoint')
  about = export(run_dir, folder, options.whole('--member'), allowed, checkpoint)
  tell(f'exported step {about["step"]:,} of {about["agent"]} to {folder}')
  if GRAPH not in about['sha256']:
    tell(f'{GRAPH} is not written: {onnx.why_not(about)}')
  if about['network'] is None:
    tell(f"podrace.load_policy({str(folder)!r}, 'jax') acts with it; the other runtimes cannot")
  print_json(about)
  return 0
