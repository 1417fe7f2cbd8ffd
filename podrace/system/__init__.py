"""Files, threads, child processes, output, signals, command-line options and importing."""
