"""Sources: iterables that fill a buffer, read in processes of their own (`worker.py`), or in threads where there is one
process only."""
