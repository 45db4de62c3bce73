"""An Atari game trained and served with Bray's components, put together in plain Python."""
