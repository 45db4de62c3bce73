"""The command line, `bray`. `main.py` says what can be typed; each command lives in a module that is imported when it
runs."""
