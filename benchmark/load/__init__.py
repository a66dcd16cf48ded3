"""The voice load: callers that speak, listen and think, against a server started for them."""
