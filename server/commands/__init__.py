"""Commands beside `serve`: talking to a running server, watching it, and describing this machine."""
