"""The numbers of a game service at `/metrics`, in Prometheus' text format: each has one line here, which is its
HELP."""

from __future__ import annotations

Numbers = dict[str, float]
"""One worker's numbers by their Prometheus name and labels: `{"bray_sessions": 3,
'bray_requests_total{kind="tick",status="200"}': 9}`."""

HELP = {
    "bray_access_refused_total": "Requests refused by the access rules, by code: bad_token, too_many_sessions, ...",
    "bray_actors_made_total": "Actors made; they are reused, so that this follows the most sessions at once.",
    "bray_body_bytes": "Bytes of request bodies that are held now.",
    "bray_bytes_received_total": "Bytes received from games.",
    "bray_bytes_sent_total": "Bytes sent to games.",
    "bray_connections": "Open connections of games.",
    "bray_connections_accepted_total": "Connections accepted.",
    "bray_connections_refused_total": "Connections closed at once because there were too many.",
    "bray_draining": "Workers that end and take no new sessions.",
    "bray_loop_blocked_total": "Times that an Actor's code kept the event loop longer than blocked_after_s.",
    "bray_model_batches_total": "Forwards of the model.",
    "bray_model_forward_seconds": "Time of a forward, a running mean of the slowest version.",
    "bray_model_outside_total": "Observations outside the bounds of their space.",
    "bray_model_queue": "Ticks that wait for the model.",
    "bray_model_samples_total": "Ticks answered by the model.",
    "bray_model_step": "Training step of the version with the largest share, by worker.",
    "bray_model_versions": "Versions of the model that are loaded.",
    "bray_pending": "Requests that are being answered or wait for their turn.",
    "bray_process_cpu_seconds_total": "CPU time of the workers.",
    "bray_process_resident_bytes": "Resident memory of the workers.",
    "bray_refused_unread_total": "Requests refused by their head, before the body was read.",
    "bray_requests_forwarded_total": "Requests handed to the worker that owns the session.",
    "bray_requests_total": "Requests answered, by kind and status.",
    "bray_sessions": "Sessions that are running.",
    "bray_sessions_expired_total": "Sessions ended because they were silent for idle_timeout_s.",
    "bray_sessions_started_total": "Sessions started.",
    "bray_slots": "Sessions that there is room for.",
    "bray_slots_free": "Sessions that could still start.",
    "bray_tick_seconds": "Time from the arrival of a tick to its answer.",
    "bray_workers": "Workers that answer.",
}
"""By name, a histogram's without `_bucket`, `_sum` and `_count`."""


def prometheus(rows: list[Numbers]) -> str:
    """Numbers of all workers in Prometheus' text format, added up; they say which worker only where a sum would mean
    nothing."""
    out: Numbers = {}
    for row in rows:
        for name, value in row.items():
            out[name] = out.get(name, 0.0) + value
    out["bray_workers"] = len(rows)
    lines, last = [], None
    for name, value in sorted(out.items(), key=lambda item: item[0].split("{")[0]):
        family = name.split("{")[0]
        base = _histogram_of(family) or family
        if base != last:
            kind = "histogram" if base != family else "counter" if family.endswith("_total") else "gauge"
            lines += [f"# HELP {base} {HELP.get(base, base)}", f"# TYPE {base} {kind}"]
            last = base
        lines.append(f"{name} {value:.10g}")
    return "\n".join(lines) + "\n"


def _histogram_of(family: str) -> str | None:
    base, _, part = family.rpartition("_")
    return base if part in ("bucket", "sum", "count") else None
