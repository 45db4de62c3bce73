"""Components that live anywhere in a cluster: models, buffers, actors, trainers, and a master that counts for them.

Each is a thin picklable handle and a plain worker class. Ray places, names and restarts the workers (`cluster.py`); samples and ticks go
over sockets of our own (`serving/link.py`) or stay in the process.
"""
