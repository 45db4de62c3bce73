"""Buffers: shards that hold samples (`worker.py`, `stores.py`), handles that push and pop them (`handle.py`), and
iterators to stack on those."""
