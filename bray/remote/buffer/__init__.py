"""Buffers: shards that hold samples in queues (`worker.py`, `queue.py`), handles that push and pop them (`handle.py`),
and iterators to stack on those."""
