"""The transport: a session is a connection, TCP or a Unix socket, under TLS beyond this machine.

`Listener` and `Link` are the two ends; services and their clients are handlers of theirs. `frame` is what goes
over the wire (docs/protocol.md), `keys` who may connect, `top` what a listener tells of itself.
"""
