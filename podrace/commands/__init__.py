"""The commands of podrace, a file each: `COMMAND` declares its options, and `run` does it."""
