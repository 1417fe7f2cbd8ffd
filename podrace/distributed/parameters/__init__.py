"""Parameters over the network: publisher, reader and messages."""
