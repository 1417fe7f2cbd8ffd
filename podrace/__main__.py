"""`python -m podrace`, where the command is not on the path."""

from podrace.cli import entry

if __name__ == '__main__':
  entry()
