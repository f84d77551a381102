"""Builds report.html from the files of a run, also while it writes.

python launch/report.py --workdir=runs/quickstart
"""

from absl import app
from absl import flags

from rlhf_jax.monitor import report

_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run.', required=True
)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got {argv[1:]}; expected only --workdir=DIR')
  try:
    path = report.write(_WORKDIR.value)
  except FileNotFoundError as error:
    raise app.UsageError(str(error)) from None
  print(path)


if __name__ == '__main__':
  app.run(main)
