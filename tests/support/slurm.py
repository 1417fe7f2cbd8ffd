"""What stands in for SLURM: `python slurm.py sbatch|srun|scontrol ARGUMENT...`, as far as podrace uses it.

Written after what SLURM 22.05 does. sbatch runs the script in the background, with SLURM_JOB_ID; srun runs a command in
a session of its own with the variables that JAX looks at, passes SIGINT on, and kills the command on SIGTERM, which it
does not pass on, and where it is killed itself. All of them write their arguments to $SLURM_LOG.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path


def main(name: str, arguments: list[str]) -> int:
  with open(os.environ['SLURM_LOG'], 'a') as log:
    log.write(json.dumps([name, *arguments]) + '\n')
  return {'sbatch': sbatch, 'srun': srun, 'scontrol': lambda _: 0}[name](arguments)


def sbatch(arguments: list[str]) -> int:
  script = Path(arguments[-1])
  output = re.search(r'^#SBATCH --output=(.*)$', script.read_text(), re.M)[1]
  with open(output.replace('%j', '7'), 'a') as out:
    environ = {**os.environ, 'SLURM_JOB_ID': '7'}
    job = subprocess.Popen(
      ('sh', str(script)), env=environ, stdout=out, stderr=out, start_new_session=True
    )
  Path(os.environ['SLURM_LOG']).with_name('job.pid').write_text(str(job.pid))
  print('7;cluster')
  return 0


def srun(arguments: list[str]) -> int:
  own = next(i for i, x in enumerate(arguments) if not x.startswith('--'))
  environ = {
    **os.environ, 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '1', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0',
  }  # fmt: skip
  signals = {signal.SIGINT, signal.SIGTERM}

  def begin() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # killed with us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

  signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the step may be up before Popen returns
  step = subprocess.Popen(arguments[own:], env=environ, start_new_session=True, preexec_fn=begin)
  passed = '--disable-status' in arguments[:own]
  signal.signal(signal.SIGINT, lambda *_: os.killpg(step.pid, signal.SIGINT) if passed else None)
  signal.signal(signal.SIGTERM, lambda *_: os.killpg(step.pid, signal.SIGKILL))
  signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
  code = step.wait()
  return code if code >= 0 else 128 - code


if __name__ == '__main__':
  sys.exit(main(sys.argv[1], sys.argv[2:]))
