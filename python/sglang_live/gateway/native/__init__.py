"""What of SGLang's own HTTP API passes the gateway, and in what form."""
