"""The voice load: users that speak, listen and pause, against a server started for them."""
