"""The scheduler, session cache and platform code that extends SGLang's own classes."""
