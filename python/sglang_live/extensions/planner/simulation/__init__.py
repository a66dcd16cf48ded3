"""A server with its users as a discrete-event simulation, with the server's own policies."""
