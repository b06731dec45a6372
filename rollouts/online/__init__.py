"""Learning from prompts as they arrive: a buffer of them, and signs that learning goes wrong."""
