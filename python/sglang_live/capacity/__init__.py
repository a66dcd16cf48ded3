"""How many sessions can be served in time, measured while serving."""
