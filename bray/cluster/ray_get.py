"""`ray.get` of what Bray returns, as code of the first Bray has it: that returned references of Ray."""

from __future__ import annotations

import functools
from typing import Any

from bray.after_import import after_import


def let_ray_get_take_ours() -> None:
    """`ray.get` of what `bray.set`, `push` and `add_source` return gives its result. Where Ray is not imported yet,
    this waits until it is."""
    after_import("ray", _patch)


def _patch(ray: Any) -> None:
    original = ray.get
    if hasattr(original, "takes_ours"):
        return

    @functools.wraps(original)
    def get(refs: Any, **kwargs: Any) -> Any:
        if isinstance(refs, list) and any(map(_is_ours, refs)):
            return [get(ref, **kwargs) for ref in refs]
        return refs.result(kwargs.get("timeout")) if _is_ours(refs) else original(refs, **kwargs)

    get.takes_ours = True  # type: ignore[attr-defined]
    ray.get = get


def _is_ours(ref: Any) -> bool:
    return type(ref).__module__.startswith("bray.") and hasattr(ref, "result")
