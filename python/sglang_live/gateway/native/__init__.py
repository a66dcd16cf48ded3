"""SGLang's own HTTP API behind the gateway: what passes, and in what form."""
