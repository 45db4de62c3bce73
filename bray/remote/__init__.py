"""Components that live anywhere in a cluster: models, buffers, actors, trainers, and a master that counts for them.

Each is a thin picklable handle and a plain worker class. `bray.cluster` places, names and restarts the workers; samples
and ticks go over sockets (`bray.serving.link`) or stay in the process.
"""
