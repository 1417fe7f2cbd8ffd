"""`python -m podrace`, where the command is not on the path."""

from podrace.cli import main

if __name__ == '__main__':
  main()
